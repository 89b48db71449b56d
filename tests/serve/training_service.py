"""A service with the training API in this process. Its worker is simulated, and its models are tables of bigrams."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from bigram_worker import BigramLauncher
from campaigns.service_process import PATIENCE_S

from lorafusion_jax.serve.api.access import Service
from lorafusion_jax.serve.api.connections import server_config
from lorafusion_jax.serve.control.controller import Controller
from lorafusion_jax.serve.server import build_app, open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store.keys import add_key
from lorafusion_jax.serve.tinker.messages import MEDIA_TYPE, message_class
from lorafusion_jax.serve.tinker.streams import Streams

ADAM = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class TrainingService:
    """A server that can be killed and started again on the same home and port."""

    def __init__(
        self, home: Path, base: Path, port: int = 0, keys: dict[str, str] | None = None,
        wrap: Callable[[Any], Any] = lambda app: app, **more: Any,
    ):  # fmt: skip
        batch = {"capacity_tokens": 128, "tile_tokens": 16}
        options = {"places": {4: 2, 8: 1}} | more
        self.settings = Settings(home=home, bases={"tiny": base}, batch=batch, training_api=True, **options)
        self.db = open_database(self.settings)
        if keys is None:
            with self.db.write() as connection:
                keys = {owner: add_key(connection, owner)[1] for owner in ("ana", "ben")}
        self.keys, self.launcher = keys, BigramLauncher()
        self.streams = Streams(self.settings, self.db)
        self.controller = Controller(self.settings, self.db, streams=self.streams, launcher=self.launcher)
        self.controller.start()
        self.service = Service(self.settings, self.db, self.controller)
        config = server_config(wrap(build_app(self.service, self.streams)), port=port, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.02)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self, *, kill: bool = False) -> None:
        """Ends the server, in good order or with its workers at once."""
        if kill:
            for worker in self.launcher.made:
                worker.kill()
        self._server.should_exit = True
        self._thread.join()
        self.controller.close()
        self.db.close()

    def ask(
        self, method: str, path: str, body: Any = None, *, owner: str = "ana", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Sends a request. Returns status, and JSON or bytes."""
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kinds = {"Content-Type": MEDIA_TYPE if isinstance(body, bytes) else "application/json"}
        request = urllib.request.Request(
            f"{self.url}/api/v1{path}", sent, kinds | {"X-API-Key": self.keys[owner]} | (headers or {}), method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                status, content, kind = answer.status, answer.read(), answer.headers.get("content-type", "")
        except urllib.error.HTTPError as problem:
            status, content, kind = problem.code, problem.read(), problem.headers.get("content-type", "")
        return status, json.loads(content) if kind.startswith("application/json") and content else content


class Model:
    """A client of one model, by HTTP alone."""

    def __init__(self, service: Any, *, owner: str = "ana", rank: int = 4, session: str = "", seq: int = 0):
        self.service, self.owner, self.seq = service, owner, 0
        if not session:
            status, answer = self.ask("/create_session", {"tags": [], "sdk_version": "0.38.0"})
            assert status == 200, answer
            session = answer["session_id"]
        self.session = session
        config = {"rank": rank, "seed": 1}
        body = {"session_id": session, "model_seq_id": seq, "base_model": "tiny", "lora_config": config}
        status, self.created = self.ask("/create_model", body)
        assert status == 200, self.created
        self.id = f"{session}:train:{seq}"

    def ask(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        return self.service.ask("POST", path, body, owner=self.owner, **more)

    def number(self, seq: int | None) -> int:
        if seq is not None:
            return seq
        self.seq += 1
        return self.seq

    def rows(
        self, tokens: list[list[int]], *, seq: int | None = None, forward_only: bool = False, **inputs: Any
    ) -> tuple[int, Any]:
        return self.ask("/forward_backward", self.body(tokens, self.number(seq), forward_only, **inputs))

    def body(
        self, tokens: list[list[int]], seq: int, forward_only: bool = False, loss: str = "cross_entropy", **inputs: Any
    ) -> bytes:
        """Rows whose targets are their next tokens."""
        request = message_class("ForwardBackwardRequest")(
            model_id=self.id, seq_id=seq, loss_fn=loss, forward_only=forward_only
        )
        for at, row in enumerate(tokens):
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = np.asarray(row[:-1], np.int32).tobytes()
            arrays = {"target_tokens": np.asarray(row[1:], np.int64)}
            for name, values in inputs.items():
                arrays[name] = np.asarray(values[at], np.int64 if name == "target_tokens" else np.float32)
            for name, array in arrays.items():
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = array.tobytes(), 2 if array.dtype == np.int64 else 1
                tensor.shape.extend(array.shape)
        return request.SerializeToString()

    def step(self, *, seq: int | None = None, **changes: float) -> tuple[int, Any]:
        body = {"model_id": self.id, "seq_id": self.number(seq), "adam_params": ADAM | changes}
        return self.ask("/optim_step", body)

    def result(self, accepted: tuple[int, Any]) -> Any:
        """Waits for a result: JSON, or the outputs and metrics of rows."""
        status, future = accepted
        assert status == 200, future
        return self.read(future["request_id"])

    def read(self, future: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            status, answer = self.ask("/retrieve_future", {"request_id": future})
            assert status == 200, answer
            if isinstance(answer, bytes):
                return read_outputs(answer)
            if answer.get("type") != "try_again":
                return answer
        raise AssertionError(f"{future} has no result")


def read_outputs(content: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    output = message_class("ForwardBackwardOutput")()
    output.ParseFromString(content)
    logprobs = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        values, offsets = np.frombuffer(field.data, np.float32), np.frombuffer(field.offsets, np.int64) // 4
        logprobs += [values[a:b].reshape(-1, *field.trailing_shape) for a, b in pairwise(offsets)]
    return logprobs, dict(output.metrics)
