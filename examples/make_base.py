"""Trains the tiny base model of the examples from scratch and writes it as a Hugging Face directory.

    python examples/make_base.py --out examples/base                         # a GPU: two minutes
    python examples/make_base.py --out build/base --steps 40 --rows 4 --row-tokens 256    # a CPU: to see that it learns
    python examples/make_base.py --out build/larger --width 1024 --layers 4               # 50 million parameters

A Llama, of 3.5 million parameters by default, learns the standard library's sources and reference; all weights train,
in float32, computing in bfloat16. The tokenizer comes first (make_tokenizer.py).

Dims: `B` rows of a step · `T` tokens of a row · `V` vocabulary
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.flax import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout that is not installed

from stdlib_text import library_documents, share
from tokenizers import Tokenizer

from lorafusion_jax.models import Decoder, ModelConfig, Segments

HELD_OUT = 0.02
STEPS_AT_ONCE = 10  # in one compiled call
HEAD = 64


def model_config(width: int, layers: int) -> ModelConfig:
    """A Llama with heads of 64 columns, two of which share their keys.

    Args:
        width: a multiple of 128.
    """
    return ModelConfig(
        family="llama",
        vocab_size=3072,
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_layers=layers,
        num_heads=width // HEAD,
        num_kv_heads=width // HEAD // 2,
        head_dim=HEAD,
        tie_embeddings=True,
        max_positions=1024,
    )


def token_streams(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encodes the library to one stream for training and one held out, documents apart by the end token.

    The library itself comes twice, its tests once (where this Python has them): there is more of them, and less to
    read.
    """
    library = library_documents()
    tests = {name: text for name, text in library_documents(tests=True).items() if name not in library}
    train, held_out = [], []
    for name, text in [*library.items(), *tests.items(), *library.items()]:
        (held_out if share("held out " + name) < HELD_OUT else train).append(text)
    return tuple(_stream(texts, tokenizer) for texts in (train, sorted(set(held_out))))


def _stream(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.token_to_id("<|end|>")
    return np.concatenate([np.array([*document.ids, end], np.uint16) for document in encoded])


def learning_rate(progress: float, peak: float) -> float:
    """Rises over the first 3 %, then falls along a cosine to a twentieth."""
    fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * min(1.0, progress / 0.03) * fall


def new_model(config: ModelConfig):
    """(graph, float32 parameters, the rest) of a model that computes in bfloat16."""
    graph, params, rest = nnx.split(Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), rest


def make_programs(graph, rest, *, rows: int, row_tokens: int, attention: str | None):
    """Compiles STEPS_AT_ONCE steps of training, and evaluation; rows are drawn on the device."""
    segments = Segments.from_lengths([row_tokens] * rows, rows * row_tokens)
    positions = np.tile(np.arange(row_tokens, dtype=np.int32), rows)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree)),
    )

    def loss_of(params, stream, starts_B):
        rows_BT = stream[starts_B[:, None] + jnp.arange(row_tokens + 1)].astype(jnp.int32)
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        logits = nnx.merge(graph, low, rest)(rows_BT[:, :-1].reshape(-1), positions, segments, attention=attention)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows_BT[:, 1:].reshape(-1)).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train(params, state, stream, key, rates):
        def step(carry, each):
            params, state = carry
            key, rate = each
            starts_B = jax.random.randint(key, (rows,), 0, stream.shape[0] - row_tokens - 1)
            loss, gradient = jax.value_and_grad(loss_of)(params, stream, starts_B)
            change, state = optimizer.update(gradient, state, params)
            return (jax.tree.map(lambda p, c: p - rate * c, params, change), state), loss

        (params, state), losses = jax.lax.scan(step, (params, state), (jax.random.split(key, len(rates)), rates))
        return params, state, losses.mean()

    return optimizer, train, jax.jit(loss_of)


def held_out_loss(evaluate, params, stream, rows: int, row_tokens: int) -> float:
    """Mean token loss of rows spread evenly over the held-out stream."""
    starts = np.linspace(0, len(stream) - row_tokens - 2, 4 * rows).astype(np.int32).reshape(4, rows)
    return float(np.mean([evaluate(params, stream, jnp.asarray(each)) for each in starts]))


def write_model(out: Path, model: ModelConfig, params) -> None:
    """Writes config.json, generation_config.json and bfloat16 weights under Hugging Face's names."""
    weights = {}
    for path, leaf in nnx.to_flat_state(params):
        name, value = "model." + ".".join(map(str, path)), leaf[...].astype(jnp.bfloat16)
        is_kernel = name.endswith(".kernel")  # ours is [in, out]
        weights[name.removesuffix(".kernel") + ".weight" if is_kernel else name] = value.T if is_kernel else value
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": model.family,
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "hidden_act": model.activation,
        "rms_norm_eps": model.norm_eps, "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": model.max_positions, "rope_theta": model.rope_theta,
        "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}, indent=2) + "\n")


def main() -> None:
    train_base(arguments().parse_args())


def arguments() -> argparse.ArgumentParser:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=here / "base")
    parser.add_argument("--tokenizer", type=Path, default=here / "base", help="folder of tokenizer.json")
    parser.add_argument("--tokens", type=Path, help="npz of token streams: read if it is there, else written")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120, help="ends sooner, with the schedule complete")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--attention", choices=["xla", "cudnn"])
    return parser


def read_streams(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Takes the token streams from a file, or makes them (and the file)."""
    if args.tokens and args.tokens.is_file():
        with np.load(args.tokens) as stored:
            return stored["train"], stored["held_out"]
    train, held_out = token_streams(Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")))
    if args.tokens:
        args.tokens.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.tokens, train=train, held_out=held_out)
    return train, held_out


def train_base(args: argparse.Namespace) -> None:
    """Trains until the steps or the seconds are used up; the learning rate follows whichever is nearer its end."""
    train_stream, held_out = (jnp.asarray(stream) for stream in read_streams(args))
    config = model_config(args.width, args.layers)
    graph, params, rest = new_model(config)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{size / 1e6:.2f} M parameters, {len(train_stream) / 1e6:.2f} M tokens, {len(held_out)} held out, "
        f"{jax.devices()[0].device_kind}",
        flush=True,
    )
    optimizer, train, evaluate = make_programs(
        graph, rest, rows=args.rows, row_tokens=args.row_tokens, attention=args.attention
    )
    measure = functools.partial(held_out_loss, evaluate, stream=held_out, rows=args.rows, row_tokens=args.row_tokens)
    print(f"before: held-out loss {measure(params):.4f}", flush=True)
    state, step, progress, began = optimizer.init(params), 0, 0.0, None
    while progress < 1:
        ends = min(1.0, (step + STEPS_AT_ONCE) / args.steps)
        rates = [
            learning_rate(progress + (max(ends, progress) - progress) * (i + 1) / STEPS_AT_ONCE, args.lr)
            for i in range(STEPS_AT_ONCE)
        ]
        params, state, loss = train(params, state, train_stream, jax.random.key(step), jnp.asarray(rates))
        loss, step = float(loss), step + STEPS_AT_ONCE
        began = began or time.monotonic()  # the first call compiles
        progress = max(step / args.steps, (time.monotonic() - began) / args.seconds)
        if step % (50 * STEPS_AT_ONCE) == 0 or progress >= 1 or step == STEPS_AT_ONCE:
            print(
                f"step {step:6}  loss {loss:.4f}  held out {measure(params):.4f}  lr {rates[-1]:.2e}  "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    write_model(args.out, config, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if args.tokenizer.resolve() != args.out.resolve():
            shutil.copyfile(args.tokenizer / name, args.out / name)
    print(f"wrote {args.out}: {sum(file.stat().st_size for file in args.out.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
