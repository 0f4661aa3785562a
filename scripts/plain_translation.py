"""The translation model in plain JAX, on one device: what the product is held against.

    python scripts/plain_translation.py --gin_file=mt_small_ende.gin --gin_param="data_dir='PATH'" --output=plain.json

Sizes, data and recipe are the Gin file's: the same batches in the same order. Everything else is written by hand here:
arrays without names, a loop over layers, optax.adafactor, a decoding loop that moves the cache along with the beams.
Expected: the BLEU of `train` and `evaluate` on the same file, up to the chance of another initialisation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]
MASKED, NOTHING, EOS = -1e9, -1e30, 1
SHARED = {"attention": 3, "relu": 1, "residual": 1}  # kinds of dropout: the axis along which the noise is the same


def init(
    key: jax.Array, vocab: int, positions: int, d_model: int, d_ff: int, heads: int, d_kv: int, layers: int
) -> Params:
    """Parameters of the paper's recipe; attention `[4, heads, d_model, d_kv]`, feed-forward `[2, d_model, d_ff]`.

    Adafactor clips each array by itself, so arrays are the recipe's variables: all norm scales of a stack are one.
    """
    keys = iter(jax.random.split(key, 8 * layers + 8))
    qk, v, o = (d_model**2 * d_kv) ** -0.25, d_model**-0.5, (d_model * heads) ** -0.5

    def attention() -> jax.Array:
        scale = jnp.array([qk, qk, v, o])[:, None, None, None]
        return scale * jax.random.normal(next(keys), (4, heads, d_model, d_kv))

    def layer(names: tuple[str, ...]) -> Params:
        made = {name: attention() for name in names}
        made["feed_forward"] = (d_ff * d_model) ** -0.25 * jax.random.normal(next(keys), (2, d_model, d_ff))
        return made

    return {
        "tokens": jax.random.normal(next(keys), (vocab, d_model)),
        "positions": jax.random.normal(next(keys), (positions, d_model)),
        "softmax": d_model**-0.5 * jax.random.normal(next(keys), (d_model, vocab)),
        "encoder": [layer(("attention",)) for _ in range(layers)],
        "decoder": [layer(("attention", "encoder_attention")) for _ in range(layers)],
        "encoder_norms": jnp.ones((2 * layers + 1, d_model)),
        "decoder_norms": jnp.ones((3 * layers + 1, d_model)),
    }


def from_product(named: dict[str, np.ndarray]) -> Params:
    """The same parameters out of the product's, whose layers are stacked."""

    def layers(side: str, names: tuple[str, ...]) -> list[Params]:
        count, stacks = len(named[f"{side}/feed_forward/wi_wo"]), {n: named[f"{side}/{n}/qkvo"] for n in names}
        stacks["feed_forward"] = named[f"{side}/feed_forward/wi_wo"]
        return [{n: s[i] for n, s in stacks.items()} for i in range(count)]

    return {
        "tokens": named["embedding/tokens"],
        "positions": named["embedding/positions"],
        "softmax": named["softmax"],
        "encoder": layers("encoder", ("attention",)),
        "decoder": layers("decoder", ("attention", "encoder_attention")),
        "encoder_norms": named["encoder/norm_scales"],
        "decoder_norms": named["decoder/norm_scales"],
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """`q: [rows, length, heads, d_kv]`, `k, v: [rows, memory, heads, d_kv]`, `bias: [rows, length, memory]`."""
    weights = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) + bias[:, None], -1)
    return jnp.einsum("bhlm,bmhk->blhk", weights, v)


def stack(
    layers: list[Params],
    scales: jax.Array,
    x: jax.Array,
    bias: jax.Array,
    drop: Any,
    memory: Any = None,
    memory_bias: Any = None,
) -> jax.Array:
    """A stack of layers with norm `scales` in their order, the final one last; `drop(x, kind)` is dropout."""
    x, norms = drop(x, "residual"), iter(scales)
    for p in layers:
        for name in ("attention", "encoder_attention"):
            if name not in p:
                continue
            wq, wk, wv, wo = p[name]
            y = norm(x, next(norms))
            m, b = (y, bias) if name == "attention" else (memory, memory_bias)
            q, k, v = (jnp.einsum("bld,hdk->blhk", a, w) for a, w in ((y, wq), (m, wk), (m, wv)))
            x = x + drop(jnp.einsum("blhk,hdk->bld", attend(q, k, drop(v, "attention"), b), wo), "residual")
        wi, wo = p["feed_forward"]
        hidden = drop(jax.nn.relu(norm(x, next(norms)) @ wi), "relu")
        x = x + drop(hidden @ wo.T, "residual")
    return drop(norm(x, next(norms)), "residual")


def no_drop(x: jax.Array, kind: str) -> jax.Array:
    """Dropout in evaluation."""
    return x


def encode(
    params: Params, sources: jax.Array, segments: jax.Array, positions: jax.Array, drop: Any = no_drop
) -> jax.Array:
    """`[rows, inputs_length, d_model]`."""
    x = params["tokens"][sources] + params["positions"][positions]
    bias = jnp.where(segments[:, :, None] == segments[:, None, :], 0.0, MASKED)
    return stack(params["encoder"], params["encoder_norms"], x, bias, drop)


def logits_of(params: Params, batch: dict[str, jax.Array], drop: Any = no_drop) -> jax.Array:
    """`[rows, length, vocab]` of packed rows."""
    memory = encode(params, batch["sources"], batch["source_segments"], batch["source_positions"], drop)
    segments = batch["segments"]
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    bias = jnp.where((segments[:, :, None] == segments[:, None, :]) & causal, 0.0, MASKED)
    memory_bias = jnp.where(segments[:, :, None] == batch["source_segments"][:, None, :], 0.0, MASKED)
    x = params["tokens"][batch["inputs"]] + params["positions"][batch["positions"]]
    x = stack(params["decoder"], params["decoder_norms"], x, bias, drop, memory, memory_bias)
    return x @ params["softmax"]


def training_step(optimizer: optax.GradientTransformation, dropout: dict[str, float], smoothing: float) -> Any:
    """`(params, opt_state, batch, key) -> (params, opt_state, loss, nll)`; `dropout` by kind, as in `SHARED`."""

    def loss(params: Params, batch: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = [0]

        def drop(x: jax.Array, kind: str) -> jax.Array:
            count[0] += 1
            if not dropout[kind]:
                return x
            shape = tuple(1 if i == SHARED[kind] else n for i, n in enumerate(x.shape))
            keep = jax.random.bernoulli(jax.random.fold_in(key, count[0]), 1 - dropout[kind], shape)
            return x * keep / (1 - dropout[kind])

        log_probs = jax.nn.log_softmax(logits_of(params, batch, drop))
        real = batch["targets"] != 0
        nll = -jnp.take_along_axis(log_probs, batch["targets"][..., None], -1)[..., 0]
        smooth = (1 - smoothing) * nll - smoothing * log_probs.mean(-1)
        return jnp.sum(smooth * real) / real.sum(), jnp.sum(nll * real) / real.sum()

    def step(params: Params, opt_state: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
        (value, nll), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, nll

    return jax.jit(step, donate_argnums=(0, 1))


def beam_search(
    params: Params, sources: jax.Array, limits: jax.Array, vocab_size: int, beam: int, alpha: float, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens `[batch, beam, steps]` and scores, best first: finished hypotheses, then those cut at their limit.

    Stops once the best can change no more, so lower finished places may hold less than their best. With a beam of 1 it is
    not greedy: two continuations are looked at, and one that ends may win over the one that goes on.
    """
    batch, width = sources.shape
    segments = (sources != 0).astype(jnp.int32)
    memory = encode(params, sources, segments, segments * jnp.arange(width))
    memory_bias = jnp.repeat(jnp.where(segments[:, None, :] != 0, 0.0, MASKED), beam, 0)
    memories = [
        [jnp.repeat(jnp.einsum("bld,hdk->blhk", memory, w), beam, 0) for w in p["encoder_attention"][1:3]]
        for p in params["decoder"]
    ]
    heads, d_kv = params["decoder"][0]["attention"].shape[1::2]
    rows = batch * beam

    def forward(tokens: jax.Array, position: jax.Array, caches: list[Any]) -> tuple[jax.Array, list[Any]]:
        x = (params["tokens"][tokens] + params["positions"][position])[:, None]
        bias = jnp.where(jnp.arange(steps) <= position, 0.0, MASKED)[None, None]
        kept = []
        norms = iter(params["decoder_norms"])
        for p, (k, v), (mk, mv) in zip(params["decoder"], caches, memories, strict=True):
            y = norm(x, next(norms))
            q, new_k, new_v = (jnp.einsum("bld,hdk->blhk", y, w) for w in p["attention"][:3])
            k = jax.lax.dynamic_update_slice_in_dim(k, new_k, position, 1)
            v = jax.lax.dynamic_update_slice_in_dim(v, new_v, position, 1)
            kept.append((k, v))
            x = x + jnp.einsum("blhk,hdk->bld", attend(q, k, v, bias), p["attention"][3])
            q = jnp.einsum("bld,hdk->blhk", norm(x, next(norms)), p["encoder_attention"][0])
            x = x + jnp.einsum("blhk,hdk->bld", attend(q, mk, mv, memory_bias), p["encoder_attention"][3])
            wi, wo = p["feed_forward"]
            x = x + jax.nn.relu(norm(x, next(norms)) @ wi) @ wo.T
        return norm(x[:, 0], next(norms)) @ params["softmax"], kept

    def penalty(length: jax.Array) -> jax.Array:
        return ((5.0 + length) / 6.0) ** alpha

    def take(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), 1)

    def body(state: Any) -> Any:
        t, active, caches, tokens, last, alive, done_tokens, done = state
        logits, caches = forward(last.reshape(rows), t, caches)
        log_probs = jax.nn.log_softmax(logits).reshape(batch, beam, -1)
        ids = jnp.arange(log_probs.shape[-1])
        total = jnp.where((ids == 0) | (ids >= vocab_size), NOTHING, log_probs) + alive[..., None]
        values, places = jax.lax.top_k(total.reshape(batch, -1), 2 * beam)
        parents, token = places // len(ids), places % len(ids)
        continued = jnp.where(jnp.arange(steps) == t, token[..., None], take(tokens, parents))
        ends = token == EOS
        scores = jnp.concatenate([done, jnp.where(ends, values / penalty(t + 1), NOTHING)], 1)
        new_done, best = jax.lax.top_k(scores, beam)
        new_done_tokens = take(jnp.concatenate([done_tokens, continued], 1), best)
        new_alive, best = jax.lax.top_k(jnp.where(ends, NOTHING, values), beam)
        parents, token, new_tokens = take(parents, best), take(token, best), take(continued, best)
        caches = [
            tuple(take(c.reshape(batch, beam, *c.shape[1:]), parents).reshape(c.shape) for c in layer)
            for layer in caches
        ]
        keep = active[:, None]
        on = active & (t + 1 < limits) & (new_alive[:, 0] / penalty(limits) > jnp.maximum(new_done[:, 0], NOTHING / 2))
        return (
            t + 1,
            on,
            caches,
            jnp.where(keep[..., None], new_tokens, tokens),
            jnp.where(keep, token, last),
            jnp.where(keep, new_alive, alive),
            jnp.where(keep[..., None], new_done_tokens, done_tokens),
            jnp.where(keep, new_done, done),
        )

    zeros = jnp.zeros((batch, beam), jnp.int32)
    empty = jnp.zeros((batch, beam, steps), jnp.int32)
    nothing = jnp.full((batch, beam), NOTHING)
    caches = [(jnp.zeros((rows, steps, heads, d_kv)),) * 2 for _ in params["decoder"]]
    start = (0, limits > 0, caches, empty, zeros, nothing.at[:, 0].set(0.0), empty, nothing)
    *_, tokens, _, alive, done_tokens, done = jax.lax.while_loop(lambda s: s[1].any(), body, start)
    exists = alive > NOTHING / 2
    _, best = jax.lax.top_k(jnp.concatenate([done, jnp.where(exists, NOTHING / 4, NOTHING)], 1), beam)
    cut = jnp.where(exists, alive / penalty(limits)[:, None], NOTHING)
    return take(jnp.concatenate([done_tokens, tokens], 1), best), take(jnp.concatenate([done, cut], 1), best)


def translate(
    params: Params, tokenizer: Any, lines: list[str], beam: int, alpha: float, most: int, batch: int = 32
) -> list[str]:
    """Translations of `lines`, in their order."""
    flat, lengths = tokenizer.encode_flat(lines)
    ids = [i.tolist() for i in np.split(flat, np.cumsum(lengths)[:-1])]
    ids = [i if len(i) <= most else [*i[: most - 1], EOS] for i in ids]
    order = sorted(range(len(ids)), key=lambda n: -len(ids[n]))
    search = jax.jit(beam_search, static_argnums=(3, 4, 5, 6))
    found = [""] * len(lines)
    for first in range(0, len(order), batch):
        numbers = order[first : first + batch]
        sources, limits = np.zeros((batch, most), np.int32), np.zeros(batch, np.int32)
        for row, n in enumerate(numbers):
            sources[row, : len(ids[n])] = ids[n]
            limits[row] = min(most, int(1.5 * len(ids[n])) + 10)
        tokens, _ = search(params, sources, limits, tokenizer.vocab_size, beam, alpha, most)
        for n, text in zip(numbers, tokenizer.decode(np.asarray(tokens)[: len(numbers), 0].tolist()), strict=True):
            found[n] = text
    return found


def main() -> None:
    """Trains, translates and scores."""
    from mtf_experiments import experiment
    from mtf_experiments.data.translation_task import TranslationTask
    from mtf_experiments.evaluation.bleu import score

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", required=True)
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--split", action="append")
    parser.add_argument("--log_every", type=int, default=50)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    exp = experiment.load([args.gin_file], args.gin_param)
    if not isinstance(exp.task, TranslationTask):
        parser.error(
            f"{args.gin_file} has a {type(exp.task).__name__}; want a TranslationTask, as mt_small_ende.gin has"
        )
    task, model = exp.task.prepare(), exp.model
    sizes = (model.d_model, model.d_ff, model.num_heads, model.d_kv, model.num_layers)
    params = init(jax.random.key(exp.seed), model.padded_vocab_size, model.row_length, *sizes)
    optimizer = optax.adafactor(
        lambda t: exp.schedule(jnp.asarray(t)), min_dim_size_to_factor=128, weight_decay_rate=None
    )
    dropout = {kind: getattr(model, f"{kind}_dropout") for kind in SHARED}
    step = training_step(optimizer, dropout, exp.training.label_smoothing)
    rows, opt_state = task.train_rows(exp.batch_size, exp.seed, model.padded_vocab_size), optimizer.init(params)
    result: dict[str, Any] = {"gin_file": args.gin_file, "steps": exp.train_steps, "curve": [], "bleu": {}}
    result["parameters"] = sum(p.size for p in jax.tree.leaves(params))
    start = time.perf_counter()
    for number in range(exp.train_steps):
        params, opt_state, loss, nll = step(params, opt_state, rows.batch(number), jax.random.key(number))
        if (number + 1) % args.log_every == 0:
            spent = time.perf_counter() - start
            result["curve"].append({"step": number + 1, "loss": float(loss), "nll": float(nll), "seconds": spent})
            print(
                f"step {number + 1}/{exp.train_steps}  loss {float(loss):.4f}  nll {float(nll):.4f}  {spent:.0f} s",
                flush=True,
            )
    for split in args.split or ["validation", "test"]:
        found = translate(
            params, task.tokenizer, task.input_lines(split), exp.decoding.beam, exp.decoding.alpha, model.row_length
        )
        scored = score(found, [task.reference_lines(split)], direction=task.direction, allow_pieces=True)
        print("\n".join([split, *scored.lines()]), flush=True)
        result["bleu"][split] = scored.as_json()
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
