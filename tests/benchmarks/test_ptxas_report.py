"""The report on machine code reads the right loop of a product."""

import pytest

from benchmarks.ptxas_report import moves_in_a_step

TILES = """
.L_x_1:
        /*0010*/                   R2UR UR4, R2 ;
.L_x_2:
        /*0020*/               @P0 BRA `(.L_x_3) ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0040*/                   {move} ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0080*/                   EXIT ;
"""


@pytest.mark.parametrize(("move", "moves"), [("R2UR UR8, R152", 1), ("UIADD3 UR8, UR8, 0x2, URZ", 0)])
def test_moves_are_counted_per_step_not_per_tile(move, moves):
    assert moves_in_a_step(TILES.format(move=move)) == moves


def test_a_kernel_without_a_main_loop_has_no_count():
    assert moves_in_a_step(TILES.replace("HGMMA", "FFMA")) is None
