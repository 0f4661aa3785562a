"""Run directories made by hand, for tests of reports: nothing is trained."""

import json
import math
from pathlib import Path

CONFIG = """# mtf_experiments config, schema version 1
batch_size = 16
d_ff = {d_ff}
d_kv = 32
d_model = {d_model}
num_heads = {heads}
num_layers = 4
train_steps = {steps}

{kind}.d_ff = %d_ff
Experiment.seed = {seed}
"""


def write(
    folder: Path,
    name: str,
    *,
    heads: int = 1,
    d_model: int = 128,
    d_ff: int | None = None,
    seed: int = 0,
    steps: int = 40,
    reached: int | None = None,
    parameters: int = 1_000_000,
    train_tokens: int = 100_000,
    nll: tuple[float, ...] = (6.0, 5.0, 4.0),
    train: float = 3.9,
    scales: tuple[float, ...] = (0.9, 1.0, 1.1),
    bleu: float | None = None,
    translations: list[str] | None = None,
    references: list[str] | None = None,
) -> Path:
    """A run whose development NLL per token takes the values `nll` at equal distances up to its last step."""
    run = folder / name
    (run / "eval").mkdir(parents=True)
    reached = steps if reached is None else reached
    kind = "LanguageModelConfig" if bleu is None else "TranslationModelConfig"
    d_ff = d_ff or 128 * heads
    (run / "config.gin").write_text(
        CONFIG.format(d_ff=d_ff, d_model=d_model, heads=heads, steps=steps, seed=seed, kind=kind)
    )
    (run / "environment.json").write_text(json.dumps({"counts": {"train": {"tokens": train_tokens}}}))
    (run / "plan.json").write_text(json.dumps({"parameters": parameters}))
    rows = []
    for step in range(4, reached + 1, 4):
        values = {"loss": train, "nll": train, "tokens": 1000.0}
        rows += [{"step": step, "key": f"train/{k}", "value": v, "time": 100.0 + step} for k, v in values.items()]
        rows.append({"step": step, "key": "speed/steps/s", "value": 2.0, "time": 100.0 + step})
    for i, value in enumerate(nll):
        step = round((i + 1) * reached / len(nll))
        rows.append({"step": step, "key": "validation/nll_per_token", "value": value, "time": 100.0 + step})
        found = [scale_of(s, value) for s in scales]
        best = min(found, key=lambda s: s["total_nll"])
        content = {
            "task": "toy",
            "split": "validation",
            "step": step,
            "checkpoint": str(run),
            "scales": found,
            "tokens": 2000,
            "per_word": 1000,
            "tuned": {"logit_scale": best["logit_scale"], "ppl_word": best["ppl_word"]},
        }
        if bleu is not None:
            content["bleu"] = {"bleu": bleu, "interval": 1.25, "signature": "nrefs:1|toy", "direction": "en-de"}
        (run / "eval" / f"toy-validation-{step}.json").write_text(json.dumps(content))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if translations:
        (run / "decodes").mkdir()
        (run / "decodes" / f"toy-validation-{reached}.txt").write_text("".join(f"{t}\n" for t in translations))
        (run / "decodes" / "toy-validation.references.txt").write_text("".join(f"{r}\n" for r in references or []))
    return run


def scale_of(scale: float, nll: float) -> dict[str, float]:
    """Scores at a logit scale: best at 0.9."""
    per_token = nll * (1 + 0.01 * abs(scale - 0.9) / 0.1)
    word = math.exp(2 * per_token)
    return {
        "logit_scale": scale,
        "total_nll": 2000 * per_token,
        "nll_per_token": per_token,
        "ppl_token": math.exp(per_token),
        "ppl_word": word,
        "ppl_word_low": 0.97 * word,
        "ppl_word_high": 1.03 * word,
    }
