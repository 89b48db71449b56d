"""Models in a worker: requests to calls and results, states between requests, and what runs again after a loss."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaigns.service_process import wait_for
from live_sessions import open_session
from small_jobs import two_adapters, write_job, write_rows
from training_service import Model as Client
from training_service import read_outputs

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config import load_config
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.errors import LoraFusionError
from lorafusion_jax.serve.tinker.datums import DatumError
from lorafusion_jax.serve.tinker.messages import message_class
from lorafusion_jax.serve.worker import samples
from lorafusion_jax.serve.worker.samples import Samples, expected_room
from lorafusion_jax.serve.worker.stream import Models
from lorafusion_jax.session import WindowPlanner

pytestmark = pytest.mark.usefixtures("quick_compiles")

TARGETS = ["q_proj", "down_proj"]
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
JOB = "job-000000000001"


@pytest.fixture(scope="module")
def session(tmp_path_factory, tiny_base):
    folder = tmp_path_factory.mktemp("job")
    rows = {name: write_rows(folder, name, 6) for name in ("law", "med")}
    entries = [entry | {"lora": {"rank": 2, "targets": TARGETS}} for entry in two_adapters(rows)]
    config = load_config(write_job(folder, tiny_base, entries, batch={"capacity_tokens": 128}))
    opened = open_session(config, {4: 7}, TARGETS, row_targets=1)
    yield opened
    opened.close()


class Worker:
    """A worker without a server: its events are kept."""

    def __init__(self, session: Any, folder: Path, *, save_s: float = 1e9):
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.folder, self._planner = folder, WindowPlanner(session)
        self.models = Models(session, self, save_s=save_s, wake=lambda: None)  # type: ignore[arg-type]
        self._session = session
        self.samples = Samples(session, self, wake=lambda: None)  # type: ignore[arg-type]

    def emit(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data in list(self.events) if name == kind]

    def start(self, *, epoch: int = 1, state: str | None = None, load: dict | None = None, job: str = JOB) -> None:
        stream = {"name": job, "rank": 3, "alpha": 32.0, "seed": 3, "targets": TARGETS, "load": load, "owner": "ana"}
        command = {"command": "start", "job": job, "epoch": epoch, "place": epoch % 7, "state": state}
        self.models.start(command | {"folder": str(self.folder / job), "values": {"stream": stream}})
        self.run(lambda: self.of("started") or self.of("failed"))

    def send(self, *requests: dict[str, Any], epoch: int = 1, job: str = JOB) -> None:
        for request in requests:
            self.models.execute({"command": "request", "job": job, "epoch": epoch} | request)

    def run(self, there: Any) -> None:
        def turn() -> bool:
            window = self._planner.plan(8)
            self._planner.run(window)
            if not window.slots and not self._planner.has_calls:
                self._session.drain()
            self.models.advance()
            self.samples.advance()
            return there()

        wait_for(turn, 0.001)

    def answers(self, count: int) -> list[dict[str, Any]]:
        self.run(lambda: len(self.of("answered")) >= count)
        return sorted(self.of("answered"), key=lambda answer: answer["seq"])

    def lose(self) -> None:
        """Ends without a word to the server."""
        for model in list(self.models._models.values()):
            model.ended = True
            self._session.drain()
            self._session.forget(model.job)


def rows(folder: Path, seq: int, tokens: list[list[int]], **more: Any) -> dict[str, Any]:
    """A request with a payload, as the server sends it."""
    client = Client.__new__(Client)
    client.id = "ses-1:train:0"
    body = client.body(tokens, seq, **more)
    path = folder / f"{seq}.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    kind = "forward" if more.get("forward_only") else "forward_backward"
    request = {"seq": seq, "kind": kind, "values": {}, "path": str(path), "bytes": len(body)}
    return request | {"sha256": hashlib.sha256(body).hexdigest(), "result": str(path.with_suffix(".out"))}


def call(home: Path, seq: int, kind: str = "optim_step", /, **values: Any) -> dict[str, Any]:
    values = values or ({"refused": ""} | ADAM)
    request = {"seq": seq, "kind": kind, "values": values, "path": None, "bytes": 0, "sha256": ""}
    return request | {"result": str(home / f"{seq}.out")}


def requests(folder: Path) -> list[dict[str, Any]]:
    """Twelve in a row: rows, of which one is refused, and four steps."""
    rng, made = np.random.default_rng(0), []
    for seq in range(1, 13):
        if seq % 3 == 0:
            made.append(call(folder, seq))
            continue
        tokens = [rng.integers(0, 50, 6).tolist() for _ in range(2)]
        weights = [[float("nan") if seq == 5 else 0.5] * 5] * 2
        made.append(rows(folder, seq, tokens, weights=weights))
    return [
        *made,
        rows(folder, 13, [[1, 2, 3, 4]], forward_only=True),
        call(folder, 14, "save_weights", refused="", folder=str(folder / "end")),
    ]


def test_a_lost_worker_ends_where_no_worker_was_lost(session, tmp_path, monkeypatch):
    tail = replace(session.free_places.tail, reproducible=True, most_adapters=1)
    monkeypatch.setattr(session.free_places, "tail", tail)
    whole = Worker(session, tmp_path / "whole")
    whole.start()
    whole.send(*requests(tmp_path / "whole"))
    answers = whole.answers(14)
    whole.lose()
    assert [answer["seq"] for answer in answers if "error" in answer] == [5]
    assert "weights is not finite" in answers[4]["error"]
    steps = [answer["result"]["metrics"]["step:max"] for answer in answers if answer["seq"] in (3, 6, 9, 12)]
    assert steps == [1, 2, 3, 4]

    lost = Worker(session, tmp_path / "lost", save_s=0.0)
    sent = requests(tmp_path / "lost")
    lost.start()
    lost.send(*sent[:8])
    lost.run(lambda: lost.of("saved"))
    lost.lose()
    state = lost.of("saved")[-1]
    assert state["step"] in (3, 6)
    again = Worker(session, tmp_path / "lost")
    again.start(epoch=2, state=state["path"])
    again.send(*sent[state["step"] :], *sent[state["step"] :], epoch=2)  # again after another connection
    answers = again.answers(14 - state["step"])
    again.lose()
    assert len(answers) == 14 - state["step"]
    for name in ("13.out", "end/state.safetensors"):
        assert (tmp_path / "lost" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_model_leaves_with_its_state_and_starts_from_a_checkpoint(session, tmp_path):
    worker = Worker(session, tmp_path)
    worker.start()
    worker.send(
        rows(tmp_path, 1, [[1, 2, 3, 4, 5]]),
        call(tmp_path, 2),
        call(tmp_path, 3, "save_weights", refused="", folder=str(tmp_path / "point")),
        call(tmp_path, 4, "save_weights_for_sampler", refused="", folder=str(tmp_path / "peft"), name="out"),
        rows(tmp_path, 5, [[1, 2, 3, 4, 5]], forward_only=True),
        call(tmp_path, 6, "save_weights", refused="a mistake"),
    )
    answers = worker.answers(6)
    (logprobs,), _ = read_outputs((tmp_path / "5.out").read_bytes())
    assert answers[4]["sha256"] == hashlib.sha256((tmp_path / "5.out").read_bytes()).hexdigest()
    assert (answers[5]["category"], "a mistake" in answers[5]["error"]) == ("user", True)
    assert (tmp_path / "peft" / "adapter_config.json").is_file()
    assert answers[3]["result"]["bytes"] > 0
    worker.models.execute({"command": "stop", "job": JOB, "epoch": 1})
    worker.run(lambda: worker.of("stopped"))
    stopped = worker.of("stopped")[0]
    assert stopped["step"] == 6
    assert Path(stopped["path"]).name == "e1-s6"
    for epoch, source in enumerate(
        ({"state": stopped["path"]}, {"load": {"folder": str(tmp_path / "point"), "optimizer": False}}), start=2
    ):
        other = Worker(session, tmp_path / str(epoch))
        other.start(epoch=epoch, **source)
        first = 7 if "state" in source else 1
        other.send(rows(tmp_path / str(epoch), first, [[1, 2, 3, 4, 5]], forward_only=True), epoch=epoch)
        other.answers(1)
        (same,), _ = read_outputs((tmp_path / str(epoch) / f"{first}.out").read_bytes())
        np.testing.assert_array_equal(same, logprobs)
        other.lose()


def test_what_cannot_be_read_fails_alone(session, tmp_path):
    worker = Worker(session, tmp_path)
    worker.start()
    damaged = rows(tmp_path, 1, [[1, 2, 3]]) | {"sha256": "0"}
    worker.send(
        damaged,
        rows(tmp_path, 2, [[1, 2, 3]]),
        call(tmp_path, 3, "load_weights", folder=str(tmp_path), optimizer=True, path="-"),
        rows(tmp_path, 4, [[1] * 130]),
    )
    answers = worker.answers(4)
    assert [answer.get("category") for answer in answers] == ["server", None, "server", "user"]
    assert "129 tokens, and a microbatch of the session holds 128" in answers[3]["error"]
    assert "damaged on the server's disk" in answers[0]["error"]
    assert "error" not in answers[1]
    assert "error" in answers[2]
    worker.models.execute({"command": "request", "job": JOB, "epoch": 7})
    assert worker.of("gone") == [{"job": JOB, "epoch": 7}]
    worker.lose()
    broken = Worker(session, tmp_path)
    broken.start(state=str(tmp_path / "e1-s4"))
    broken.run(lambda: broken.of("failed"))
    assert not broken.models.holds()


PROMPT = [3, 1, 4, 1, 5]


def ask(worker: Worker, name: str, folder: Path | None, prompt: list[int] = PROMPT, **more: Any) -> None:
    """Asks for samples, twice as after a lost connection."""
    result = worker.folder / f"{name}.sample"
    result.parent.mkdir(parents=True, exist_ok=True)
    values = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}} | more
    place = None if folder is None else str(folder)
    command = {"command": "sample", "future": name, "folder": place, "values": values, "result": str(result)}
    worker.samples.take(command)
    worker.samples.take(command)


def asked(worker: Worker, name: str, folder: Path | None, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    """Returns what the worker tells of samples."""
    ask(worker, name, folder, prompt, **more)
    worker.run(lambda: any(told["future"] == name for told in worker.of("sampled")))
    (told,) = [told for told in worker.of("sampled") if told["future"] == name]
    return told


def sampled(worker: Worker, name: str, folder: Path | None, prompt: list[int] = PROMPT, **more: Any) -> Any:
    """Returns samples as a message."""
    told = asked(worker, name, folder, prompt, **more)
    assert "error" not in told, told["error"]
    message = message_class("SampleResponse")()
    message.ParseFromString((worker.folder / f"{name}.sample").read_bytes())
    return message


def drawn(message: Any) -> list[tuple[list[int], list[float]]]:
    pairs = [(np.frombuffer(each.tokens, "<i4"), np.frombuffer(each.logprobs, "<f4")) for each in message.sequences]
    return [(tokens.tolist(), logprobs.tolist()) for tokens, logprobs in pairs]


def scores_of(worker: Worker, seq: int, tokens: list[int]) -> np.ndarray:
    """Log p of the tokens after the first, by `forward`."""
    worker.send(rows(worker.folder, seq, [tokens], forward_only=True))
    worker.run(lambda: any(told["seq"] == seq for told in worker.of("answered")))
    (logprobs,), _ = read_outputs((worker.folder / f"{seq}.out").read_bytes())
    return logprobs


@pytest.fixture(scope="module")
def sampling(session, tmp_path_factory):
    """A model that was saved after a step, in both forms, and not trained since."""
    worker = Worker(session, tmp_path_factory.mktemp("sampling"))
    worker.start()
    peft, state = worker.folder / "peft", worker.folder / "state"
    worker.send(
        rows(worker.folder, 1, [[1, 2, 3, 4, 5]]),
        call(worker.folder, 2),
        call(worker.folder, 3, "save_weights_for_sampler", refused="", folder=str(peft), name=None),
        call(worker.folder, 4, "save_weights", refused="", folder=str(state)),
    )
    worker.answers(4)
    yield worker, peft, state
    worker.lose()
    worker.samples.close()


def test_samples_have_the_log_probabilities_of_forward(sampling):
    worker, peft, state = sampling
    greedy = {"sampling_params": {"max_tokens": 6, "temperature": 0.0, "stop": []}}
    everything = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    message = sampled(worker, "greedy", peft, num_samples=2, **greedy, **everything)
    (tokens, logprobs), second = drawn(message)
    assert (len(tokens), second[0], message.sequences[0].stop_reason) == (6, tokens, 1)
    scores = scores_of(worker, 5, PROMPT + tokens)
    np.testing.assert_allclose(logprobs, scores[4:], atol=1e-5)
    of_prompt = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(of_prompt[0])
    np.testing.assert_allclose(of_prompt[1:], scores[:4], atol=1e-5)
    listed = message.sequences[0].topk_sampled_logprobs
    assert (listed.k, listed.length, message.topk_prompt_logprobs.length) == (2, 6, 5)
    assert np.frombuffer(listed.token_ids, "<i4").reshape(6, 2)[:, 0].tolist() == tokens
    np.testing.assert_allclose(np.frombuffer(listed.logprobs, "<f4").reshape(6, 2)[:, 0], logprobs, atol=1e-6)
    assert np.frombuffer(message.topk_prompt_logprobs.logprobs, "<f4")[0] == -99999.0

    blocks, size_gb = re.fullmatch(
        r"cache for samples: (\d+) blocks of 32 tokens, (\S+) GB, for \d+ adapters", worker.samples._bank.room
    ).groups()
    assert int(blocks) * 32 >= worker.samples._bank.most_tokens
    assert float(size_gb) > 0

    of_base = drawn(sampled(worker, "base", None, PROMPT + tokens, prompt_logprobs=True, **greedy))
    assert not np.allclose(of_base[0][1], logprobs)
    ((same, same_logprobs),) = drawn(sampled(worker, "of-state", state, **greedy))
    assert same == tokens
    np.testing.assert_allclose(same_logprobs, logprobs, atol=1e-6)
    worker.send(rows(worker.folder, 6, [PROMPT]), call(worker.folder, 7))  # the model trains, its snapshots stay
    assert drawn(sampled(worker, "later", peft, **greedy)) == [(tokens, logprobs)]
    assert not np.allclose(scores_of(worker, 8, PROMPT + tokens), scores)


def test_a_worker_says_how_much_it_can_sample_beside_slots(session, monkeypatch):
    assert expected_room(session, 4) == ""  # a CPU has no limit
    texts = []
    for size in (1 << 31, 3 << 30, 4 << 30):
        monkeypatch.setattr(samples, "device_bytes", lambda size=size: size)
        texts.append(expected_room(session, 4))
    pattern = r"beside slots, by count: a cache of (\S+) GB for samples, (\d+) sequences of 4096 tokens"
    rooms = [float(re.fullmatch(pattern, text).group(1)) for text in texts]
    assert rooms[2] - rooms[1] == pytest.approx(0.8 * (1 << 30) / 1e9, rel=0.01)
    assert 0 < rooms[0] < 0.8 * (1 << 31) / 1e9
    monkeypatch.setattr(samples, "device_bytes", lambda: 1 << 29)
    assert expected_room(session, 4).endswith("that is little for 4 adapters: take fewer --sampler-places or --places")


def test_samples_end_by_their_stops_and_differ_by_their_seeds(sampling):
    worker, peft, _ = sampling
    free = {"sampling_params": {"max_tokens": 8, "seed": 2**64 - 1, "stop": []}}
    both = drawn(sampled(worker, "free", peft, num_samples=3, **free))
    assert len({tuple(tokens) for tokens, _ in both}) == 3
    assert drawn(sampled(worker, "again", peft, **free)) == both[:1]
    one = {"sampling_params": {"max_tokens": 8, "seed": 0, "stop": []}}
    assert drawn(sampled(worker, "next-seed", peft, **one))[0][0] == both[1][0]
    tokens, logprobs = both[0]
    at = tokens.index(tokens[4])
    stopped = sampled(worker, "ids", peft, sampling_params=free["sampling_params"] | {"stop": [tokens[4]]})
    assert drawn(stopped)[0][0] == tokens[: at + 1]
    assert stopped.sequences[0].stop_reason == 0
    np.testing.assert_allclose(drawn(stopped)[0][1], logprobs[: at + 1], atol=1e-6)
    text = load_tokenizer(base_directory(worker._session.config)).decode(tokens[:3])
    by_text = sampled(worker, "text", peft, sampling_params=free["sampling_params"] | {"stop": text})
    assert drawn(by_text)[0][0] == tokens[:3]
    filtered = sampled(worker, "top", peft, sampling_params={"max_tokens": 4, "top_k": 1, "top_p": 0.5, "stop": []})
    greedy = sampled(worker, "greedy-4", peft, sampling_params={"max_tokens": 4, "temperature": 0.0, "stop": []})
    assert drawn(filtered)[0][0] == drawn(greedy)[0][0]


def test_a_folder_has_the_scale_of_each_projection(sampling, tmp_path):
    """That of training: alpha / √rank of each layer, by the patterns of the folder."""
    worker, peft, _ = sampling
    bank = worker.samples._bank
    plain, folder = bank.read(peft), tmp_path / "patterns"
    shutil.copytree(peft, folder)
    (folder / "SHA256SUMS").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    config |= {"use_rslora": True, "alpha_pattern": {"1.self_attn.q_proj": 5, "down_proj": 7}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    read = bank.read(folder)
    alphas = {"q_proj": [config["lora_alpha"], 5], "down_proj": [7, 7]}
    for name, leaf in read.items():
        path, _, kind = name.rpartition(".")
        wanted = np.ones(2) if kind == "lora_a" else np.array(alphas[path.rpartition(".")[2]]) / config["r"] ** 0.5
        before = 1 if kind == "lora_a" else scale
        np.testing.assert_allclose(leaf[:2], plain[name][:2] / before * wanted[:, None, None], rtol=1e-5)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises((DatumError, LoraFusionError)):
        bank.read(folder)


def complete(worker: Worker, name: str, folder: Path | None, **more: Any) -> list[dict[str, Any]]:
    """Asks for a completion, and returns its parts."""
    values = {"messages": None, "prompts": ["one two three"], "n": 2, "stream": False, "scored": True}
    values |= {"sampling": {"max_tokens": 12, "temperature": 1.0, "seed": 5}} | more
    worker.samples.take({"command": "complete", "future": name, "folder": folder and str(folder), "values": values})
    worker.run(lambda: any(told["future"] == name and told.get("ended", True) for told in worker.of("completed")))
    told = [told for told in worker.of("completed") if told["future"] == name]
    assert "error" not in told[-1], told[-1]
    return [part for event in told for part in event["parts"]]


def test_completions_grow_in_parts_to_the_whole_answer(sampling):
    worker, peft, _ = sampling
    whole = complete(worker, "whole", peft)
    assert [(part["index"], part["tokens"], part["end"]) for part in whole] == [(0, 12, "length"), (1, 12, "length")]
    assert whole[0]["text"] != whole[1]["text"]
    parts = complete(worker, "parts", peft, stream=True)
    assert len(parts) > 2
    for answer in whole:
        mine = [part for part in parts if part["index"] == answer["index"]]
        assert "".join(part["text"] for part in mine) == answer["text"]
        assert [entry[0] for part in mine for entry in part["logprobs"]] == [e[0] for e in answer["logprobs"]]
    messages = [{"role": "user", "content": "one two three"}]
    greedy = {"sampling": {"max_tokens": 12, "temperature": 0.0}, "messages": messages, "n": 1}
    texts = [complete(worker, f"chat-{folder}", folder, **greedy)[0]["text"] for folder in (None, peft)]
    assert texts[0] != texts[1]
    worker.samples.take({"command": "complete", "future": "left", "folder": None, "values": {}})
    worker.samples.cancel("left")
    assert not worker.samples.busy


def test_prompts_are_scored_at_targets_and_at_their_ends(sampling):
    worker, peft, _ = sampling
    scores = np.frombuffer(sampled(worker, "all", peft, **SCORED).prompt_logprobs, "<f4")
    last = np.frombuffer(sampled(worker, "last", peft, prompt_logprobs_last_n=2, **SCORED).prompt_logprobs, "<f4")
    assert np.isnan(last).tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(last[3:], scores[3:], atol=1e-5)
    dense = {"data": [PROMPT[1], -1, -1, PROMPT[2], 0, 1, PROMPT[4], 7], "dtype": "int64", "shape": [4, 2]}
    tensor = sampled(worker, "dense", peft, target_prompt_logprobs=dense, **SCORED).target_prompt_logprobs
    cells = np.frombuffer(tensor.dense, "<f4").reshape(tensor.shape)
    np.testing.assert_allclose([cells[0, 0], cells[1, 1], cells[3, 0]], scores[[1, 2, 4]], atol=1e-5)
    assert (cells[0, 1], cells[1, 0]) == (0.0, 0.0)
    sparse = {"data": [PROMPT[1], 9, PROMPT[4]], "dtype": "int64", "shape": [4, 2]}
    sparse |= {"sparse_crow_indices": [0, 1, 1, 1, 3], "sparse_col_indices": [1, 0, 1]}
    tensor = sampled(worker, "sparse", peft, target_prompt_logprobs=sparse, **SCORED).target_prompt_logprobs
    np.testing.assert_allclose(np.frombuffer(tensor.sparse_csr.values, "<f4")[[0, 2]], scores[[1, 4]], atol=1e-5)
    assert np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist() == [1, 0, 1]


SCORED = {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1, "temperature": 0.0}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": []}, "has no token"),
        ({"prompt": [10**6]}, "has the token 1000000"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be"),
        ({"sampling_params": {"max_tokens": 1, "top_k": -2}}, "top_k must be"),
        ({"sampling_params": {"max_tokens": 1, "stop": [1, "a"]}}, "stop"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "1 to 4"),
        ({"topk_sample_logprobs": 65}, "0 to 64"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}}, "the shape [1, 1], not [4,"),
        ({"folder": "nowhere"}, "were removed"),
    ],
)
def test_mistakes_in_samples_fail_alone(sampling, change, text):
    worker, peft, _ = sampling
    folder = worker.folder / change["folder"] if "folder" in change else peft
    values = {name: value for name, value in change.items() if name != "folder"}
    told = asked(worker, f"wrong-{text}".replace("/", "-"), folder, **values)
    assert text in told["error"]
    assert told["category"] == "user"


def test_damaged_weights_are_no_mistake_of_the_client(sampling):
    worker, peft, state = sampling
    for folder, file in ((peft, "adapter_model.safetensors"), (state, "state.safetensors")):
        damaged = worker.folder / f"damaged-{folder.name}"
        shutil.copytree(folder, damaged)
        (damaged / file).write_bytes((folder / file).read_bytes()[:-8])
        told = asked(worker, damaged.name, damaged)
        assert ("cannot be read" in told["error"], told["category"]) == (True, "server")


def test_cancelled_samples_end(sampling):
    worker, peft, _ = sampling
    endless = {"max_tokens": 100, "temperature": 0.0, "stop": []}
    ask(worker, "long", peft, num_samples=2, sampling_params=endless)
    worker.run(lambda: worker.samples._bank is not None and worker.samples._bank.engine.busy)
    for name in ("long", "long", "unknown"):
        worker.samples.cancel(name)
    assert not worker.samples.busy
    few = {"max_tokens": 6, "temperature": 0.0, "stop": []}
    assert len(drawn(sampled(worker, "after", peft, sampling_params=few))[0][0]) == 6
    assert not worker.samples._bank.engine.busy
    assert not any(told["future"] == "long" for told in worker.of("sampled"))


def test_gradients_that_were_saved_are_stepped(session, tmp_path):
    """A state between rows and their step, from which another model starts."""
    worker = Worker(session, tmp_path)
    place = {"job": "job-000000000002", "epoch": 3}
    worker.start(**place)
    point = tmp_path / "point"
    save = call(tmp_path, 2, "save_weights", refused="", folder=str(point))
    worker.send(rows(tmp_path, 1, [[1, 2, 3, 4, 5]]), save, call(tmp_path, 3), **place)
    norm = worker.answers(3)[2]["result"]["metrics"]["grad_norm:mean"]
    worker.lose()
    other = Worker(session, tmp_path / "other")
    other.start(**place, load={"folder": str(point), "optimizer": True})
    other.send(call(tmp_path, 1), **place)
    assert other.answers(1)[0]["result"]["metrics"]["grad_norm:mean"] == pytest.approx(norm) != 0
    other.lose()
