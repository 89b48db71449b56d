"""The training API by HTTP and protobuf: order, repetition, limits, owners, results and restarts. Without the SDK."""

from __future__ import annotations

import http.client
import io
import tarfile
import threading
import time
import urllib.error
import urllib.request
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from bigram_worker import WORDS, BigramProcess, Bigrams
from campaigns.service_process import wait_for
from sqlalchemy import select
from training_service import ADAM, Model, TrainingService

from lorafusion_jax.serve.store.keys import Limits, add_key
from lorafusion_jax.serve.store.tables import removals
from lorafusion_jax.serve.tinker import bodies, checkpoints, log, results, training
from lorafusion_jax.serve.tinker.datums import read_batch
from lorafusion_jax.serve.tinker.messages import message_class, read_head
from lorafusion_jax.serve.tinker.streams import Streams

ROWS = [[1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9, 2, 6], [0, 1]]


@pytest.fixture(scope="module")
def service(tmp_path_factory, tiny_base):
    running = TrainingService(tmp_path_factory.mktemp("training") / "home", tiny_base)
    yield running
    running.close()


@pytest.fixture
def model(service):
    model = Model(service)
    yield model
    model.ask(f"/sessions/{model.session}/finish", {"reason": {"type": "success"}})
    BigramProcess.runs.set()


def alone(*batches: list[list[int]]) -> Bigrams:
    """A model after a step for each batch."""
    reference = Bigrams()
    for batch in batches:
        loss, gradient = 0.0, np.zeros((WORDS, WORDS))
        for row in batch:
            log_p = reference.logprobs(np.array(row[:-1]))
            for at, (word, target) in enumerate(pairwise(row)):
                loss -= log_p[at, target]
                gradient[word] += np.exp(log_p[at])
                gradient[word, target] -= 1
        reference.arrays["sum"] = gradient
        reference.step(ADAM)
    return reference


def chosen(model: Bigrams, row: list[int]) -> np.ndarray:
    """Log p of each next token."""
    return model.logprobs(np.array(row[:-1]))[np.arange(len(row) - 1), row[1:]]


def losses(model: Model, rows: list[list[int]] = ROWS) -> float:
    return model.result(model.rows(rows, forward_only=True))[1]["loss:sum"]


def test_calls_train_and_return_every_log_probability(model):
    assert model.read(model.created["request_id"]) == {"type": "create_model", "model_id": model.id}
    logprobs, metrics = model.result(model.rows(ROWS))
    assert [len(row) for row in logprobs] == [4, 7, 1]
    np.testing.assert_allclose(metrics["loss:sum"], 12 * np.log(WORDS))  # a sum, no mean
    taken = model.result(model.step())
    assert taken["metrics"]["step:max"] == 1
    reference = alone(ROWS)
    for row, values in zip(ROWS, model.result(model.rows(ROWS, forward_only=True))[0], strict=True):
        np.testing.assert_allclose(
            values, reference.logprobs(np.array(row[:-1]))[np.arange(len(row) - 1), row[1:]], 1e-5
        )
    status, info = model.ask("/get_info", {"model_id": model.id})
    assert (status, info["lora_rank"], info["model_data"]["model_name"]) == (200, 4, "tiny")


def test_requests_run_in_the_order_of_their_numbers_and_once(model, service):
    """They arrive backwards, and each twice."""
    model.read(model.created["request_id"])
    first = len(BigramProcess.order)
    futures = [model.step(seq=4), model.rows(ROWS[1:], seq=3), model.step(seq=2), model.rows(ROWS[:1], seq=1)]
    again = [model.step(seq=4), model.rows(ROWS[1:], seq=3), model.step(seq=2), model.rows(ROWS[:1], seq=1)]
    assert [future for _, future in futures] == [future for _, future in again]
    body = {"session_id": model.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
    for status, refused in (  # as of a second client of the same model, or of a fork
        model.step(seq=3), model.step(seq=2, learning_rate=0.5), model.rows(ROWS, seq=3),
        model.ask("/create_model", body),
    ):  # fmt: skip
        assert (status, refused["error"]["code"]) == (422, "api.other-request")
    for future in futures:
        model.result(future)
    assert [seq for _, seq in BigramProcess.order[first:]] == [1, 2, 3, 4]
    model.seq = 4
    reference = alone(ROWS[:1], ROWS[1:])
    np.testing.assert_allclose(losses(model), -sum(chosen(reference, row).sum() for row in ROWS), rtol=1e-6)
    assert model.result(model.rows(ROWS[1:], seq=3))[1]["loss:sum"] > 0  # read again
    status, refused = model.step(seq=3)
    assert (status, refused["error"]["code"]) == (422, "api.other-request")


def test_mistakes_fail_their_request_alone(model):
    logprobs = losses(model)
    for inputs, text in (
        ({"weights": [[np.nan] * (len(row) - 1) for row in ROWS]}, "not finite"),
        ({"loss": "cispo_2"}, "loss"),
        ({"target_tokens": [[1]] * 3}, "1 targets of 4 tokens"),
    ):
        answer = model.result(model.rows(ROWS, **inputs))
        assert text in answer["error"]
        assert answer["category"] == "user"
    model.seq += 1
    body = message_class("ForwardBackwardRequest")(model_id=model.id, seq_id=model.seq)
    body.data.add().model_input.add().image.data = b"png"
    answer = model.result(model.ask("/forward_backward", body.SerializeToString()))
    assert "datum 0: model_input has a chunk of image" in answer["error"]
    model.seq += 1
    dimuon = {"type": "dimuon", "version": 1}
    asked = {"model_id": model.id, "seq_id": model.seq, "optimizer_params": dimuon}
    assert "adamw" in model.result(model.ask("/optim_step", asked))["error"]
    model.result(model.rows(ROWS, weights=[[0.0] * (len(row) - 1) for row in ROWS]))
    model.result(model.step())
    np.testing.assert_allclose(losses(model), logprobs)  # nothing of it was learned


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"base_model": "huge"}, "huge is not served; there is tiny"),
        ({"lora_config": {"rank": 9}}, "rank 9 is above the largest place of the service, 8"),
        ({"lora_config": None}, "full fine-tuning"),
        ({"lora_config": {"rank": 4, "train_mlp": False, "train_attn": False}}, "train_attn or train_mlp"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
    ],
)
def test_models_that_cannot_be_are_failed_futures(model, change, text):
    body = {"session_id": model.session, "model_seq_id": 7, "base_model": "tiny", "lora_config": {"rank": 4}} | change
    _, future = model.ask("/create_model", body | {"model_seq_id": sum(map(ord, text))})
    answer = model.read(future["request_id"])
    assert text in answer["error"]
    assert answer["category"] == "user"


def test_ids_of_others_are_not_there(model, service):
    model.result(model.rows(ROWS))
    future = model.created["request_id"]

    def ben(path: str, body: object) -> int:
        return service.ask("POST", path, body, owner="ben")[0]

    assert ben("/retrieve_future", {"request_id": future}) == 410
    assert ben("/retrieve_future", {"request_id": "ses-0:train:0:1"}) == 410
    assert ben("/optim_step", {"model_id": "ses-0:train:0", "seq_id": 1, "adam_params": ADAM}) == 404
    assert ben("/get_info", {"model_id": model.id}) == 404
    assert ben("/forward_backward", model.body(ROWS, seq=2)) == 404
    assert ben("/optim_step", {"model_id": model.id, "seq_id": 2, "adam_params": ADAM}) == 404
    assert ben("/unload_model", {"model_id": model.id}) == 404
    assert ben("/session_heartbeat", {"session_id": model.session}) == 404
    assert ben(f"/sessions/{model.session}/finish", {}) == 404
    assert ben("/create_model", {"session_id": model.session, "model_seq_id": 1, "base_model": "tiny"}) == 404
    assert service.ask("GET", f"/sessions/{model.session}", owner="ben")[0] == 404
    assert service.ask("GET", "/sessions", owner="ben")[1] == {"sessions": []}
    assert model.session in service.ask("GET", "/sessions")[1]["sessions"]
    assert service.ask("GET", f"/sessions/{model.session}")[1]["training_run_ids"] == [model.id]
    assert (service.settings.home / "requests").glob(".*part").__next__ is not None
    assert model.result(model.rows(ROWS, seq=1))  # nobody has changed anything


def test_a_poll_is_woken_by_its_result_and_says_what_it_waits_for(model, service, monkeypatch):
    model.read(model.created["request_id"])
    BigramProcess.runs.clear()
    _, future = model.rows(ROWS)
    monkeypatch.setattr(results, "HOLD_S", 0.1)
    assert model.ask("/retrieve_future", future | {"allow_metadata_only": True})[0] == 422  # fields are checked
    _, answer = model.ask("/retrieve_future", {"request_id": future["request_id"]})
    assert answer == {"type": "try_again", "request_id": future["request_id"], "queue_state": "active"}
    monkeypatch.setattr(results, "HOLD_S", 30.0)
    timer = threading.Timer(0.3, BigramProcess.runs.set)
    timer.start()
    started = time.monotonic()
    assert model.result((200, future))[1]["loss:sum"] > 0
    assert time.monotonic() - started < 20


def test_a_full_table_of_places_says_so(service, monkeypatch):
    monkeypatch.setattr(results, "HOLD_S", 0.2)
    models = [Model(service, rank=8)]
    models[0].read(models[0].created["request_id"])
    models += [Model(service, rank=8, session=models[0].session, seq=1)]
    _, answer = models[1].ask("/retrieve_future", {"request_id": models[1].created["request_id"]})
    assert answer["queue_state"] == "paused_capacity"
    assert answer["queue_state_reason"].startswith(
        "number 1 of those that wait: the only place that holds lora of rank 8"
    )
    early = models[1].rows(ROWS)  # it may be used already
    unload = models[0].ask("/unload_model", {"model_id": models[0].id})
    assert models[0].result(unload)["type"] == "unload_model"
    assert models[1].result(early)[1]["loss:sum"] > 0
    status, refused = models[0].rows(ROWS)
    assert (status, refused["error"]["why"]) == (410, "its client has ended it, or it has failed")
    models[1].ask(f"/sessions/{models[1].session}/finish", {})
    assert models[1].ask("/session_heartbeat", {"session_id": models[1].session})[0] == 410
    assert models[1].rows(ROWS)[0] == 410


def test_a_model_moves_to_a_smaller_place_when_the_larger_one_is_waited_for(model, service):
    """Between two halves of a batch: it goes on from its weights, moments and gradients."""
    small = [model] + [Model(service, session=model.session, seq=seq) for seq in (1, 2)]
    for one in small:
        one.read(one.created["request_id"])

    def rank_of_place(one: Model) -> int:
        with service.db.read() as connection:
            job = log.find_model(connection, one.id, None)["job"]
        place = next(place for place, held in service.controller.places().items() if held == job)
        return service.controller.layout().ranks[place]

    mover = next(one for one in small if rank_of_place(one) == 8)
    mover.result(mover.rows(ROWS))
    mover.result(mover.step())
    mover.result(mover.rows(ROWS[:2]))
    leaver = next(one for one in small if one is not mover)
    leaver.result(leaver.ask("/unload_model", {"model_id": leaver.id}))
    large = Model(service, rank=7, session=model.session, seq=3)
    assert large.result(large.rows(ROWS))[1]["loss:sum"] > 0  # it has a place
    mover.result(mover.rows(ROWS[2:]))
    mover.result(mover.step())
    assert (rank_of_place(mover), rank_of_place(large)) == (4, 8)
    logprobs, _ = mover.result(mover.rows(ROWS[1:2], forward_only=True))
    expected = alone(ROWS, ROWS).logprobs(np.array(ROWS[1][:-1]))
    np.testing.assert_allclose(logprobs[0], expected[np.arange(7), ROWS[1][1:]], atol=1e-6)


def test_models_have_the_weight_of_their_owner(model, service):
    """Its models share it where the slots are planned, see `Turns`."""
    with service.db.write() as connection:
        service.keys["cleo"] = add_key(connection, "cleo", limits=Limits(share=2.0))[1]
    models = [model, Model(service, session=model.session, seq=1), Model(service, owner="cleo", rank=8)]
    for one in models:
        one.read(one.created["request_id"])

    def weights() -> list[float]:
        with service.db.read() as connection:
            jobs = [log.find_model(connection, one.id, None)["job"] for one in models]
            return [service.service.jobs.get(connection, job)["weight"] for job in jobs]

    wait_for(lambda: weights() == [1.0, 1.0, 2.0])
    with service.db.read() as connection:
        job = service.service.jobs.get(connection, log.find_model(connection, models[2].id, None)["job"])
    assert service.controller.values(job)["stream"]["owner"] == "cleo"
    models[2].ask(f"/sessions/{models[2].session}/finish", {})


def test_bodies_are_unpacked_with_limits(model, service, monkeypatch):
    packed = {"Content-Encoding": "zstd"}
    whole = zstandard.ZstdCompressor().compress(model.body(ROWS, seq=model.number(None)))
    assert model.result(model.ask("/forward_backward", whole, headers=packed))[1]["loss:sum"] > 0
    parts = {path.name for path in (service.settings.home / "requests").iterdir()}

    def refused(body: bytes, **headers: str) -> tuple[int, str]:
        status, answer = model.ask("/forward_backward", body, headers=headers)
        return status, answer["error"]["code"]

    zeros = zstandard.ZstdCompressor(level=19).compress(b"\0" * (bodies.LARGEST + 1))
    assert len(zeros) < 100_000
    assert refused(zeros, **packed) == (413, "api.too-large")
    assert refused(whole[:-5], **packed) == (422, "api.body")
    assert refused(whole + b"more", **packed) == (422, "api.body")
    assert refused(b"no zstd at all", **packed) == (422, "api.body")
    assert refused(b"", **{"Content-Encoding": "br"}) == (415, "api.encoding")
    assert refused(b"{}", **{"Content-Type": "application/json"}) == (415, "api.media-type")
    assert refused(b"\x0a\xff\xff") == (422, "api.body")
    assert refused(b"\x1a\x05\x0a\x03\x0a\x01" * 3) == (422, "api.body")
    monkeypatch.setattr(bodies, "LARGEST_PACKED", 1000)
    assert refused(b"\0" * 1001) == (413, "api.too-large")
    monkeypatch.setattr(bodies, "RECEIVING_OF_OWNER", 10)
    assert refused(b"\0" * 11) == (429, "api.bodies")
    assert {path.name for path in (service.settings.home / "requests").iterdir()} == parts
    monkeypatch.undo()
    assert losses(model) > 0


def test_bodies_of_no_use_fail_in_their_turn(model, service, monkeypatch):
    """What says whose turn it is leaves no hole behind: the next requests run."""
    pack = zstandard.ZstdCompressor(level=19).compress
    turn = message_class("ForwardBackwardRequest")(model_id=model.id)

    def numbered(rest: bytes) -> bytes:
        turn.seq_id = model.number(None)
        return turn.SerializeToString() + rest

    packed = {"Content-Encoding": "zstd"}
    futures = [
        (model.ask("/forward_backward", pack(numbered(b"\0" * bodies.LARGEST)), headers=packed), "unpacked, it has at"),
        (model.ask("/forward_backward", numbered(b"\x1a\x00" * 5000)), "at most 4096 datums"),
        (model.ask("/forward_backward", numbered(b"\x1a\x7f")), "in the middle of a message"),
        (model.step(learning_rate="much"), "adam_params.learning_rate"),
        (model.step(momentum=0.9), "no field momentum"),
        (save(model, "save_weights", "a", ttl_seconds="soon"), "ttl_seconds"),
        (save(model, "save_weights_for_sampler", "a", kind="other"), "kind"),
        (model.ask("/load_weights", {"model_id": model.id, "seq_id": model.number(None), "path": "a"}), "optimizer"),
    ]
    monkeypatch.setattr(bodies, "LARGEST_PACKED", 10_000)
    futures.append((model.ask("/forward_backward", numbered(b"\x1a\x00" * 9000)), "as it is sent"))
    for future, text in futures:
        answer = model.result(future)
        assert text in answer["error"]
        assert answer["category"] == "user"
    assert losses(model) > 0
    assert model.ask("/optim_step", {"model_id": model.id, "adam_params": ADAM})[0] == 422  # of no turn


def test_a_hole_in_the_numbers_is_named(model, monkeypatch):
    model.result(model.rows(ROWS))
    monkeypatch.setattr(results, "HOLD_S", 0.05)
    _, future = model.rows(ROWS, seq=4)
    model.rows(ROWS, seq=2)
    model.read(f"{model.id}:2")
    answer = model.ask("/retrieve_future", {"request_id": future["request_id"]})[1]
    assert answer["queue_state_reason"] == "it waits for request 3 of this model, which has not arrived"
    monkeypatch.undo()
    model.rows(ROWS, seq=3)
    assert model.result((200, future))[1]["loss:sum"] > 0


def test_a_request_that_never_comes_fails_after_a_while(model, monkeypatch):
    """The SDK has used its number where it cannot write it, and its later requests would never be answered."""
    before = losses(model)  # request 1
    late = [model.rows(ROWS, seq=4), model.step(seq=6)]
    monkeypatch.setattr(log, "GAP_S", 0.3)
    assert model.result(late[0])[1]["loss:sum"] == pytest.approx(before)
    assert "grad_norm:mean" in str(model.result(late[1]))
    model.seq = 6
    assert losses(model) < before
    monkeypatch.undo()
    for seq, send in ((2, model.rows), (5, model.rows), (3, model.rows)):  # it comes after all: it has failed
        answer = model.result(send(ROWS, seq=seq))
        assert f"request {seq} of this model did not arrive" in answer["error"]


def test_results_that_nobody_fetches_are_removed(model, service, monkeypatch):
    """Ten thousand of them; others are served meanwhile."""
    model.rows(ROWS)
    assert losses(model) > 0
    row = {"owner": "ben", "stream": "ses-0:train:0", "kind": "forward", "state": "done", "result": {}, "sha256": ""}
    row |= {"path": None, "bytes": 0, "read": None, "until": 1.0}
    with service.db.write() as connection:
        rows = [row | {"id": f"ses-0:train:0:{seq}", "seq": seq} for seq in range(10_000)]
        connection.execute(log.t.api_futures.insert(), rows)
        connection.exec_driver_sql("UPDATE api_futures SET until = 1 WHERE id = ?", (f"{model.id}:1",))

    def remain() -> int:
        with service.db.read() as connection:
            return connection.exec_driver_sql("SELECT count(*) FROM api_futures WHERE until < 2").scalar_one()

    result = service.settings.home / log.payload_of(model.id, 1).replace(".pb", ".out")
    monkeypatch.setattr("lorafusion_jax.serve.tinker.streams.LOOK_S", 0.0)
    wait_for(lambda: not remain() and not result.exists())
    status, late = model.rows(ROWS, seq=1)
    assert (status, late["error"]["code"]) == (410, "api.expired")
    assert losses(model) > 0


def test_a_damaged_result_is_the_fault_of_the_server(model, service):
    for seq, damage in enumerate((lambda path: path.write_bytes(b"other"), lambda path: path.unlink()), start=1):
        future = model.rows(ROWS)
        model.result(future)
        damage(service.settings.home / log.payload_of(model.id, seq).replace(".pb", ".out"))
        answer = model.result(future)
        assert ("damaged" in answer["error"], answer["category"]) == (True, "server")


def test_samples_are_cancelled_and_calls_are_not(model, service):
    rows = model.rows(ROWS)
    model.result(rows)
    base = {"session_id": model.session, "sampling_session_seq_id": 5, "base_model": "tiny"}
    sampler = model.ask("/create_sampling_session", base)[1]["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ROWS[0]}]}
    BigramProcess.runs.clear()
    _, future = model.ask("/asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt})
    cancel = {"request_id": future["request_id"]}
    assert service.ask("POST", "/cancel_future", cancel, owner="ben")[0] == 410
    assert [model.ask("/cancel_future", cancel)[0] for _ in range(2)] == [204, 204]
    assert model.read(future["request_id"]) == {"error": "it was cancelled", "category": "user"}
    with service.db.read() as connection:
        assert not log.waiting_samples(connection)
    assert model.ask("/cancel_future", {"request_id": rows[1]["request_id"]})[0] == 422
    BigramProcess.runs.set()


def test_a_slow_body_keeps_nobody_waiting(model, service, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_S", 0.5)
    slow = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    slow.putrequest("POST", "/api/v1/forward_backward")
    for name, value in (("X-API-Key", service.keys["ben"]), ("Content-Type", "application/x-protobuf")):
        slow.putheader(name, value)
    slow.putheader("Content-Length", "1000000")
    slow.endheaders(b"\0" * 10)
    assert losses(model) > 0
    assert slow.getresponse().status == 408
    slow.close()


def test_too_many_that_wait_are_refused(model, monkeypatch):
    model.read(model.created["request_id"])
    monkeypatch.setattr(log, "MOST_WAITING", 3)
    accepted = [model.rows(ROWS, seq=seq) for seq in (2, 3, 4)]  # 1 is missing
    status, answer = model.rows(ROWS, seq=5)
    assert (status, answer["error"]["code"]) == (429, "api.waiting")
    assert model.rows(ROWS, seq=2) == accepted[0]  # a repeated one is none more
    monkeypatch.setattr(log, "MOST_WAITING", 4096)
    monkeypatch.setattr(log, "MOST_BYTES", 1000)
    assert model.rows(ROWS, seq=5)[0] == 429
    monkeypatch.undo()
    model.result(model.rows(ROWS, seq=1))
    for one in accepted:
        model.result(one)
    assert model.rows(ROWS, seq=0)[0] == 422


def test_a_silent_client_gives_its_place_up_and_comes_back(service, monkeypatch):
    model = Model(service)
    model.result(model.rows(ROWS))
    model.result(model.step())
    before = losses(model)
    model.result(model.rows(ROWS))  # it dies before its step
    monkeypatch.setattr("lorafusion_jax.serve.tinker.streams.ALIVE_S", 0.2)
    wait_for(lambda: state_of(service, model) == "paused")
    monkeypatch.undo()
    np.testing.assert_allclose(losses(model), before)
    model.result(model.step())
    reference = alone(ROWS, ROWS)
    np.testing.assert_allclose(losses(model), -sum(chosen(reference, row).sum() for row in ROWS), rtol=1e-6)
    model.ask(f"/sessions/{model.session}/finish", {})


@pytest.mark.parametrize("hours", [2, -2])
def test_nobody_is_judged_by_a_clock_that_was_set(tmp_path, tiny_base, monkeypatch, hours):
    """A client has not been silent for an hour because the machine slept, or its clock was wrong."""
    service = TrainingService(tmp_path / "home", tiny_base)
    try:
        model = Model(service)
        before = losses(model)  # request 1
        late, clock = model.rows(ROWS, seq=3), time.time
        service.streams.look()
        monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
        until = time.monotonic() + 2.5  # two looks and more
        wait_for(lambda: time.monotonic() > until)
        assert state_of(service, model) == "running"
        assert model.result(model.rows(ROWS, seq=2))[1]["loss:sum"] == pytest.approx(before)
        assert model.result(late)[1]["loss:sum"] == pytest.approx(before)
    finally:
        service.close()


def test_what_was_accepted_survives_a_killed_server_and_worker(tmp_path, tiny_base):
    """The end is that of a service that nobody has killed."""
    service = TrainingService(tmp_path / "home", tiny_base, lease_s=1.0)
    model = Model(service)
    model.read(model.created["request_id"])
    futures = [model.rows(ROWS), model.step(), model.rows(ROWS[:2]), model.rows(ROWS[1:])]
    for future in futures:
        model.result(future)
    base = {"session_id": model.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = model.ask("/create_sampling_session", base)[1]["sampling_session_id"]
    BigramProcess.runs.clear()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ROWS[0]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    samples = model.ask("/asample", asked)[1]
    futures += [model.step(), model.rows(ROWS), model.step(), model.rows(ROWS[:1]), model.step()]
    service.close(kill=True)
    BigramProcess.runs.set()
    service = TrainingService(tmp_path / "home", tiny_base, service.port, service.keys, lease_s=1.0)
    try:
        model.service = service
        for future in futures:
            model.result(future)
        assert len(samples_of(model, samples).sequences[0].tokens) == 8  # two tokens
        service.launcher.made[-1].crash()
        futures = [model.rows(ROWS), model.step()]
        last = model.result(model.rows(ROWS, forward_only=True))
        for future in futures:
            model.result(future)
        wanted = alone(ROWS, ROWS[:2] + ROWS[1:], ROWS, ROWS[:1], ROWS)
        for row, values in zip(ROWS, last[0], strict=True):
            np.testing.assert_allclose(values, chosen(wanted, row), rtol=1e-6)
    finally:
        service.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/copy_weights"), ("GET", "/billing/usage/events"), ("POST", "/create_custom_loss"), ("GET", "/whoami")],
)
def test_what_is_not_served_says_why(service, method, path):
    status, answer = service.ask(method, path, {} if method == "POST" else None)
    assert (status, answer["error"]["code"]) == (403, "api.not-served")  # the SDK sends again what 501 answers
    assert all(answer["error"].values())


def test_clients_are_told_what_to_use(service):
    status, config = service.ask("POST", "/client/config", {"sdk_version": "0.38.0"})
    assert status == 200
    assert config["proto_compress_fwdbwd"]
    assert not config["pjwt_auth_enabled"]
    assert service.ask("POST", "/client/config", {"sdk_version": "9", "new_wish": True})[0] == 422
    assert service.ask("POST", "/client/config", {"sdk_version": "9", "new_wish": None})[0] == 200
    models = service.ask("GET", "/get_server_capabilities")[1]["supported_models"]
    served = {"model_name": "tiny", "max_context_length": 128, "trainable": True, "sampleable": True}
    assert models == [served]
    assert service.ask("POST", "/telemetry", {"events": [{"a": 1}]})[1] == {"status": "accepted"}


def test_sessions_of_an_owner_are_limited_and_repeated_once(service, monkeypatch):
    key = {"X-Idempotency-Key": "one"}
    first = service.ask("POST", "/create_session", {"tags": []}, owner="ben", headers=key)
    assert service.ask("POST", "/create_session", {"tags": []}, owner="ben", headers=key) == first
    monkeypatch.setattr("lorafusion_jax.serve.tinker.sessions.MOST_SESSIONS", 1)
    assert service.ask("POST", "/create_session", {"tags": []}, owner="ben")[0] == 429
    monkeypatch.setattr(training, "MOST_MODELS", 0)
    session = first[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert service.ask("POST", "/create_model", body, owner="ben")[0] == 429


def test_datums_are_read_as_they_were_written():
    request = message_class("ForwardBackwardRequest")(model_id="m", seq_id=2, loss_fn="ppo")
    request.loss_fn_config["clip"] = 0.5
    request.loss_fn_config_v2["clip"].number = 0.25
    request.loss_fn_config_v2["name"].text = "x"
    datum = request.data.add()
    for part in ([1, 2], [3]):
        datum.model_input.add().encoded_text.tokens = np.array(part, np.int32).tobytes()
    half = datum.loss_fn_inputs["weights"]
    half.dense, half.dtype = (np.float32([1.5, -2, 0]).view(np.uint32) >> 16).astype(np.uint16).tobytes(), 4
    csr = datum.loss_fn_inputs["target_tokens"]
    csr.dtype = 2
    csr.shape.extend((3, 2))
    csr.sparse_csr.values = np.array([7, 8], np.int64).tobytes()
    csr.sparse_csr.crow_indices = np.array([0, 1, 2, 2], np.int64).tobytes()
    csr.sparse_csr.col_indices = np.array([0, 1], np.int64).tobytes()
    head = read_head(request.SerializeToString())
    assert (head.model_id, head.seq_id, head.datums, head.tokens) == ("m", 2, 1, 3)
    batch = read_batch(request.SerializeToString())
    assert batch.config == {"clip": 0.25, "name": "x"}
    (read,) = batch.datums
    assert read.tokens.tolist() == [1, 2, 3]
    assert read.inputs["weights"].tolist() == [1.5, -2, 0]
    assert read.inputs["target_tokens"].shape == (3, 2)


def state_of(service: TrainingService, model: Model) -> str:
    with service.db.read() as connection:
        return service.service.jobs.get(connection, log.find_model(connection, model.id, None)["job"])["state"]


def test_checkpoints_start_models_and_belong_to_their_owner(model, service):
    for rows in (ROWS, ROWS[:2]):
        model.rows(rows)
        model.step()
    saved = model.result(save(model, "save_weights", "first", user_metadata={"kind": "test"}))
    path = f"tinker://{model.id}/weights/first"
    assert (saved["type"], saved["path"]) == ("save_weights", path)
    again = model.result(save(model, "save_weights", "first"))
    assert (again["category"], path in again["error"]) == ("user", True)
    before = losses(model)
    model.rows(ROWS[1:])
    model.step()
    assert model.result(save(model, "save_weights", "first", overwrite=True))["path"] == path
    after = losses(model)
    assert after < before

    def load(seq: int, **changes: object) -> dict:
        body = {"session_id": model.session, "model_seq_id": seq, "path": path, "optimizer": True} | changes
        status, future = model.ask("/load_weights", body)
        assert status == 200, future
        return model.read(future["request_id"])

    loaded = load(1)
    assert loaded == {"type": "load_weights", "path": path, "model_id": f"{model.session}:train:1"}
    same = Model.__new__(Model)
    same.service, same.owner, same.seq, same.session, same.id = service, "ana", 0, model.session, loaded["model_id"]
    np.testing.assert_allclose(losses(same), after)
    for one in (model, same):
        one.rows(ROWS)
        one.step()
    np.testing.assert_allclose(losses(same), losses(model))  # the optimizer came along
    model.ask("/unload_model", {"model_id": same.id})
    assert "no checkpoint" in load(2, path=path + "x")["error"]
    assert "their owner's only" in load(3, weights_access_token="a")["error"]
    assert "of the base tiny" in load(4, base_model="other")["error"]
    model.seq += 1
    old = {"model_id": model.id, "seq_id": model.seq, "path": path, "optimizer": False}
    assert model.result(model.ask("/load_weights", old))["path"] == path
    np.testing.assert_allclose(losses(model), after)

    def ben(method: str, where: str, body: object = None) -> int:
        return service.ask(method, where, body, owner="ben")[0]

    route = f"/training_runs/{model.id}/checkpoints/weights/first"
    assert ben("POST", "/weights_info", {"tinker_path": path}) == 404
    assert ben("DELETE", route) == 404
    assert ben("PUT", route + "/ttl", {"ttl_seconds": 3600}) == 404
    assert ben("GET", f"/training_runs/{model.id}") == 404
    assert ben("GET", f"/training_runs/{model.id}/checkpoints") == 404
    assert service.ask("GET", "/checkpoints", owner="ben")[1]["checkpoints"] == []
    runs = service.ask("GET", "/training_runs", owner="ben")[1]["training_runs"]
    assert {run["model_owner"] for run in runs} <= {"ben"}
    assert model.ask("/weights_info", {"tinker_path": path})[1]["lora_rank"] == 4
    run = service.ask("GET", f"/training_runs/{model.id}")[1]
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/first"
    folder = service.settings.home / "checkpoints" / model.session
    assert len(list(folder.glob("train-0/*"))) == 1  # the refused one and the replaced one are gone
    assert service.ask("PUT", route + "/ttl", {"ttl_seconds": 60})[0] == 422
    assert service.ask("PUT", route + "/ttl", {"ttl_seconds": 3600})[0] == 204
    assert service.ask("GET", f"/training_runs/{model.id}/checkpoints")[1]["checkpoints"][0]["expires_at"]
    with service.db.write() as connection:
        connection.exec_driver_sql("UPDATE api_checkpoints SET expires = 1")
    assert model.ask("/weights_info", {"tinker_path": path})[0] == 404
    model.ask(f"/sessions/{model.session}/finish", {})  # a load in a log would run again
    wait_for(lambda: not list(folder.glob("train-0/*")))


def test_nobody_loads_a_checkpoint_that_is_being_replaced(model, service, monkeypatch):
    """It would be the old one, without a word: requests of a model run in their order."""
    path = model.result(save(model, "save_weights", "last"))["path"]
    with monkeypatch.context() as held:
        held.setattr(service.streams, "push", lambda job: None)
        model.rows(ROWS)
        model.step(learning_rate=0.5)
        replaced = save(model, "save_weights", "last", overwrite=True)
        load = {"model_id": model.id, "seq_id": model.number(None), "path": path, "optimizer": True}
        early = model.ask("/load_weights", load)
        other = save(model, "save_weights", "other")
        copy = {"session_id": model.session, "model_seq_id": 1, "path": path, "optimizer": True}
        early_copy = model.ask("/load_weights", copy)
    assert model.result(save(model, "save_weights", "one-more"))["path"]
    after = losses(model)
    assert model.result(replaced)["path"] == path
    for answer in (model.result(early), model.result(early_copy)):
        assert answer["category"] == "user"
        assert "is written by request 4 of its model" in answer["error"]
    assert model.result(other)["path"]
    model.rows(ROWS)
    model.step(learning_rate=0.5)
    load["seq_id"] = model.number(None)
    assert model.result(model.ask("/load_weights", load))["path"] == path
    assert losses(model) == after


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank": 2}, "rank of the checkpoint is 2, and of the model 4"),
        ({"train_mlp": False}, "train_mlp of the checkpoint is False"),
    ],
)
def test_a_state_of_another_shape_is_the_mistake_of_a_client(model, service, change, text):
    config = {"rank": 4, "seed": 1} | change
    body = {"session_id": model.session, "model_seq_id": 1, "base_model": "tiny", "lora_config": config}
    other = Model.__new__(Model)
    other.service, other.owner, other.seq, other.session = service, "ana", 0, model.session
    other.id = model.ask("/create_model", body)[1]["model_id"]
    path = other.result(save(other, "save_weights", "first"))["path"]
    before = losses(model)
    load = {"model_id": model.id, "seq_id": model.number(None), "path": path, "optimizer": True}
    answer = model.result(model.ask("/load_weights", load))
    assert (answer["category"], text in answer["error"]) == ("user", True)
    assert losses(model) == before
    model.ask("/unload_model", {"model_id": other.id})


def test_a_model_that_cannot_be_made_again_ends(tmp_path, tiny_base, monkeypatch):
    """Its client has been told of gradients that it would not have."""
    monkeypatch.setattr(BigramProcess, "save_every", 1000)
    service = TrainingService(tmp_path / "home", tiny_base, lease_s=1.0)
    try:
        model, other = Model(service), Model(service)
        for one in (model, other):
            one.rows(ROWS)
            one.result(one.step())
        before = losses(other)
        payload = service.settings.path(log.payload_of(model.id, 1))
        payload.write_bytes(payload.read_bytes()[:-1])
        service.launcher.made[-1].crash()
        wait_for(lambda: state_of(service, model) == "failed")
        status, answer = model.rows(ROWS)
        assert (status, answer["error"]["code"]) == (410, "api.model-over")
        assert "request 1 ran again after a lost worker, and failed then" in answer["error"]["what"]
        assert losses(other) == before
    finally:
        service.close()


@pytest.mark.parametrize("way", ["overwritten", "deleted"])
def test_a_load_runs_again_though_its_checkpoint_is_gone(tmp_path, tiny_base, monkeypatch, way):
    """Else a model whose worker was lost would go on from other weights, without a word."""
    monkeypatch.setattr(BigramProcess, "save_every", 1000)
    service = TrainingService(tmp_path / "home", tiny_base, lease_s=1.0)
    try:
        model = Model(service)
        model.rows(ROWS)
        model.step()
        path = model.result(save(model, "save_weights", "last"))["path"]
        body = {"session_id": model.session, "model_seq_id": 1, "path": path, "optimizer": True}
        copy = Model.__new__(Model)
        copy.service, copy.owner, copy.seq, copy.session = service, "ana", 0, model.session
        copy.id = model.read(model.ask("/load_weights", body)[1]["request_id"])["model_id"]
        for _ in range(2):
            model.rows(ROWS[:1])
            model.step()
        old = {"model_id": model.id, "seq_id": model.number(None), "path": path, "optimizer": True}
        model.result(model.ask("/load_weights", old))
        assert losses(model) == losses(copy)
        if way == "overwritten":
            model.rows(ROWS[1:])
            model.step()
            model.result(save(model, "save_weights", "last", overwrite=True))
        else:
            assert service.ask("DELETE", f"/training_runs/{model.id}/checkpoints/weights/last")[0] == 204
        before = [losses(model), losses(copy)]
        service.launcher.made[-1].crash()
        np.testing.assert_allclose([losses(model), losses(copy)], before)
        model.ask(f"/sessions/{model.session}/finish", {})
        folder = service.settings.home / "checkpoints" / model.session / "train-0"
        wait_for(lambda: len(list(folder.glob("*"))) == (way == "overwritten"))
    finally:
        service.close()


def test_a_checkpoint_that_was_deleted_as_the_server_died_is_removed_later(model, service, monkeypatch):
    model.result(save(model, "save_weights", "old"))
    folder = service.settings.home / "checkpoints" / model.session / "train-0"
    with monkeypatch.context() as killed:
        killed.setattr(Streams, "taken", lambda streams: streams._unneeded.clear())
        assert service.ask("DELETE", f"/training_runs/{model.id}/checkpoints/weights/old")[0] == 204
        assert list(folder.glob("*"))
    wait_for(lambda: not list(folder.glob("*")))

    def noted() -> list[str]:
        with service.db.read() as connection:
            return list(connection.execute(select(removals.c.path)).scalars())

    wait_for(lambda: not noted())


def test_samplers_are_named_and_sample_what_was_saved(model, service):
    model.result(model.rows(ROWS[:1]))
    model.result(model.step())
    first = save(model, "save_weights_for_sampler", None, sampling_session_seq_id=0)
    repeated = {"model_id": model.id, "seq_id": model.seq, "sampling_session_seq_id": 7}  # the SDK draws it anew
    assert model.ask("/save_weights_for_sampler", repeated) == first
    made = model.result(first)
    assert made["sampling_session_id"].endswith(":0")
    named = model.result(save(model, "save_weights_for_sampler", "out"))["path"]
    again = model.result(save(model, "save_weights_for_sampler", "out"))
    assert again["error"] == f"there is a checkpoint {named}. another name"  # the SDK overwrites states only
    body = {"session_id": model.session, "sampling_session_seq_id": 1, "model_path": named}
    assert service.ask("POST", "/create_sampling_session", body, owner="ben")[0] == 404
    assert model.ask("/create_sampling_session", body | {"model_path": named + "x"})[0] == 404
    assert model.ask("/create_sampling_session", body | {"model_path": None, "base_model": "huge"})[0] == 422
    sampler = model.ask("/create_sampling_session", body)[1]["sampling_session_id"]
    assert model.ask("/create_sampling_session", body)[1]["sampling_session_id"] == sampler
    shown = service.ask("GET", f"/samplers/{sampler}")
    assert shown == (200, {"sampler_id": sampler, "base_model": "tiny", "model_path": named})
    assert service.ask("GET", f"/samplers/{sampler}", owner="ben")[0] == 404
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ROWS[0][:2]}]}
    for name in (made["sampling_session_id"], sampler):
        asked = {"sampling_session_id": name, "seq_id": 0, "num_samples": 2, "prompt": prompt}
        asked |= {"sampling_params": {"max_tokens": 9, "stop": [5]}, "prompt_logprobs": True}
        status, future = model.ask("/asample", asked)
        assert (status, len(set(future["sample_sequence_ids"]))) == (200, 2)
        assert model.ask("/asample", asked)[1] == future
        message = samples_of(model, future)
        assert [np.frombuffer(each.tokens, "<i4").tolist() for each in message.sequences] == [[3, 4, 5]] * 2
        assert np.frombuffer(message.prompt_logprobs, "<f4")[1] > -np.log(WORDS)
        assert service.ask("POST", "/asample", asked, owner="ben")[0] == 404
    wrong = asked | {"seq_id": 1, "prompt": {"chunks": []}}
    assert model.read(model.ask("/asample", wrong)[1]["request_id"]) == {
        "error": "the prompt has no token", "category": "user",
    }  # fmt: skip
    long = asked | {"seq_id": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3] * 20_000}]}}
    status, future = model.ask("/asample", long)  # more values than other bodies may have
    assert status == 200
    assert samples_of(model, future).sequences
    base = model.ask(
        "/create_sampling_session", body | {"sampling_session_seq_id": 2, "model_path": None, "base_model": "tiny"}
    )
    future = model.ask("/asample", asked | {"sampling_session_id": base[1]["sampling_session_id"]})[1]
    np.testing.assert_allclose(np.frombuffer(samples_of(model, future).prompt_logprobs, "<f4")[1], -np.log(WORDS))
    with service.db.read() as connection:
        assert not log.waiting_samples(connection)


def test_a_sampler_that_is_used_stays_among_many_new_ones(model, monkeypatch):
    """As the reference of a policy that makes a sampler at every step."""
    monkeypatch.setattr(checkpoints, "MOST_SAMPLERS", 2)
    prompt, params = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, {"max_tokens": 1}

    def made(seq: int) -> str:
        body = {"session_id": model.session, "sampling_session_seq_id": seq, "base_model": "tiny"}
        return model.ask("/create_sampling_session", body)[1]["sampling_session_id"]

    def status(sampler: str, seq: int) -> int:
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": prompt, "sampling_params": params}
        return model.ask("/asample", body)[0]

    reference = made(0)
    for step in range(1, 4):
        newest = made(step)
        assert (status(newest, 0), status(reference, step)) == (200, 200)
    assert status(f"{model.session}:sample:1", 1) == 404


def samples_of(model: Model, future: dict) -> Any:
    """Waits for samples."""
    for _ in range(5):
        status, content = model.ask("/retrieve_future", {"request_id": future["request_id"]})
        assert status == 200
        if isinstance(content, bytes):
            break
    message = message_class("SampleResponse")()
    message.ParseFromString(content)
    return message


def test_names_and_times_of_checkpoints_are_checked_in_their_turn(model):
    answers = [
        (save(model, "save_weights", "../x"), "no name of a checkpoint"),
        (save(model, "save_weights", "a", ttl_seconds=10), "ttl_seconds is 3600 to"),
        (save(model, "save_weights_for_sampler", "a", kind="inflight"), "inflight"),
        (save(model, "save_weights_for_sampler", None), "neither a path nor"),
        (save(model, "save_weights_external", "a", age_encryption_recipients=["age1"]), "not encrypted"),
    ]
    for future, text in answers:
        answer = model.result(future)
        assert text in answer["error"]
        assert answer["category"] == "user"
    assert losses(model) > 0


def test_external_weights_are_downloaded_by_signed_urls(model, service):
    path = model.result(save(model, "save_weights_external", "out"))["path"]
    assert path == f"tinker://{model.id}/external_weights/out"
    route = f"/training_runs/{model.id}/checkpoints/external_weights/out/external_weights_urls"
    assert service.ask("GET", route, owner="ben")[0] == 404
    urls = service.ask("GET", route)[1]["urls"]
    assert list(urls) == ["state.npz"]
    with urllib.request.urlopen(urls["state.npz"]) as answer:  # without a key
        assert answer.read()[:2] == b"PK"
    for wrong in (urls["state.npz"][:-1] + "x", urls["state.npz"].replace("until=", "until=1")):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(wrong)
    checkpoint = route.removesuffix("/external_weights_urls")
    archive = service.ask("GET", checkpoint + "/archive")[1]["url"]
    with urllib.request.urlopen(archive) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        assert tar.getnames() == ["state.npz", "checkpoint_complete"]
        with urllib.request.urlopen(urls["state.npz"]) as stored:
            assert tar.extractfile("state.npz").read() == stored.read()
    assert service.ask("GET", checkpoint.replace("external_weights", "weights") + "/archive")[0] == 422
    assert service.ask("DELETE", checkpoint + "-2")[0] == 404
    assert [service.ask("DELETE", checkpoint)[0] for _ in range(2)] == [204, 204]
    assert service.ask("DELETE", checkpoint, owner="ben")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urls["state.npz"])


def save(model: Model, route: str, name: str | None, **more: object) -> tuple[int, dict]:
    return model.ask(f"/{route}", {"model_id": model.id, "seq_id": model.number(None), "path": name} | more)
