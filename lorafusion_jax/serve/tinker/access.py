"""What the routes of the training API share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from lorafusion_jax.serve.api.access import AdaptersRead as Downloader
from lorafusion_jax.serve.api.access import InTurn, ServiceOf
from lorafusion_jax.serve.api.access import JobsRead as Reader
from lorafusion_jax.serve.api.access import JobsWrite as Writer
from lorafusion_jax.serve.tinker.streams import Streams

PREFIX = "/api/v1"
UPLOADS = (f"{PREFIX}/forward_backward",)  # its bodies have limits of their own


async def streams_of(request: Request) -> Streams:
    return request.app.state.streams


StreamsOf = Annotated[Streams, Depends(streams_of)]
__all__ = ["PREFIX", "UPLOADS", "Downloader", "InTurn", "Reader", "ServiceOf", "StreamsOf", "Writer", "streams_of"]
