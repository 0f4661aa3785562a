"""BLEU and chrF by sacreBLEU, of detokenised text, with what makes a score comparable: signature, counts, interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mtf_experiments.errors import UserError

Tokenize = Literal["13a", "intl", "char", "none"]
Smooth = Literal["exp", "floor", "add-k", "none"]

_PIECE_MARKS = re.compile("\u2581|@@( |$)")
_SPACED_END = re.compile(r"\w\s+[.。]\s*[\"'”»]?\s*$")  # French sets spaces before ! and ?
_MOST_EMPTY = 0.005
_LEAST_FOR_INTERVAL = 10  # sentences; of fewer there is no interval worth the name


@dataclass(frozen=True)
class BleuResult:
    """The scores of one set of hypotheses and what was compared.

    `bleu` and `chrf` (chrF2) are of 100; `interval` is half the width of the 95 % bootstrap interval of BLEU, around
    `bootstrap_mean`, or None. `length_ratio` is hypothesis / reference length in tokens. `truncated` sources were cut before
    they were translated, `unfinished` hypotheses stopped at their greatest length. `name` is "BLEU" for sacreBLEU's standard
    (13a, case kept, exponential smoothing) alone, other settings have other names.
    """

    name: str
    bleu: float
    chrf: float
    interval: float | None
    bootstrap_mean: float | None
    precisions: tuple[float, ...]
    brevity_penalty: float
    length_ratio: float
    hypothesis_length: int
    reference_length: int
    signature: str
    chrf_signature: str
    direction: str
    sentences: int
    references: int
    empty_hypotheses: int
    empty_references: int
    truncated: int
    unfinished: int

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"precisions": list(self.precisions)}

    def metrics(self) -> dict[str, float]:
        """The scalars to plot."""
        return {self.name.lower(): self.bleu, "chrf": self.chrf, "length_ratio": self.length_ratio}

    def lines(self) -> list[str]:
        """For people: the scores, the counts, and a warning where there is reason for one."""
        interval = "" if self.interval is None else f" ± {self.interval:.2f} (95 %)"
        of = f"{self.direction}, " if self.direction else ""
        result = [
            f"  {self.name} {self.bleu:.2f}{interval}, chrF2 {self.chrf:.2f}, length ratio {self.length_ratio:.3f} "
            f"({of}{self.sentences:,} sentences)",
            f"  {' / '.join(f'{p:.1f}' for p in self.precisions)} (1- to 4-grams), brevity penalty "
            f"{self.brevity_penalty:.3f}; {self.empty_hypotheses:,} hypotheses empty, {self.empty_references:,} references "
            f"empty, {self.truncated:,} sources truncated, {self.unfinished:,} hypotheses unfinished",
            f"  {self.name} {self.signature}; chrF {self.chrf_signature}",
        ]
        if self.empty_hypotheses > _MOST_EMPTY * self.sentences:
            result.append(
                f"  warning: {self.empty_hypotheses / self.sentences:.1%} of the hypotheses are empty "
                "(Decoding.min_length forbids that)"
            )
        return result


def score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenize: Tokenize = "13a",
    smooth: Smooth = "exp",
    lowercase: bool = False,
    bootstrap: int = 1000,
    direction: str = "",
    truncated: int = 0,
    unfinished: int = 0,
    allow_pieces: bool = False,
) -> BleuResult:
    """Corpus BLEU and chrF2 of `hypotheses` against one or more streams of `references`, each as long as they are.

    `bootstrap` resamples (fewer than 2: none) give the interval; the seed is sacreBLEU's own, 12345 or the environment's
    SACREBLEU_SEED, and is part of the signature. Raises UserError for unequal lengths, for no sentences, and, unless
    `allow_pieces`, for text that still looks tokenised or in subword pieces: a wrong but plausible score.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    check_streams(hypotheses, references)
    if not allow_pieces:
        check_detokenised(hypotheses, "hypotheses", tokenize)
        for number, stream in enumerate(references, 1):
            check_detokenised(stream, f"references {number}", tokenize)
    bleu = BLEU(tokenize=tokenize, smooth_method=smooth, lowercase=lowercase, force=True)
    chrf = CHRF(lowercase=lowercase)
    streams = [list(r) for r in references]
    with_interval = bootstrap > 1 and len(hypotheses) >= _LEAST_FOR_INTERVAL
    found: Any = bleu.corpus_score(list(hypotheses), streams, n_bootstrap=bootstrap if with_interval else 1)
    found_chrf = chrf.corpus_score(list(hypotheses), streams)
    return BleuResult(
        name=score_name(tokenize, smooth, lowercase),
        bleu=found.score,
        chrf=found_chrf.score,
        interval=found._ci if with_interval else None,
        bootstrap_mean=found._mean if with_interval else None,
        precisions=tuple(found.precisions),
        brevity_penalty=found.bp,
        length_ratio=found.sys_len / found.ref_len if found.ref_len else 0.0,
        hypothesis_length=found.sys_len,
        reference_length=found.ref_len,
        signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        direction=direction,
        sentences=len(hypotheses),
        references=len(references),
        empty_hypotheses=sum(not h.strip() for h in hypotheses),
        empty_references=sum(not line.strip() for stream in references for line in stream),
        truncated=truncated,
        unfinished=unfinished,
    )


@dataclass(frozen=True)
class Comparison:
    """A paired bootstrap test (Koehn 2004): `p_value` that the difference of two systems' BLEU is chance."""

    first: float
    second: float
    p_value: float
    resamples: int

    def line(self) -> str:
        """For people."""
        verdict = "significant" if self.p_value < 0.05 else "not significant"
        return (
            f"  {self.first:.2f} against {self.second:.2f}: difference {self.second - self.first:+.2f}, "
            f"p = {self.p_value:.4f} ({verdict} at 0.05, {self.resamples:,} resamples)"
        )


def compare(
    first: Sequence[str],
    second: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenize: Tokenize = "13a",
    smooth: Smooth = "exp",
    lowercase: bool = False,
    resamples: int = 1000,
    allow_pieces: bool = False,
) -> Comparison:
    """Whether `second` differs from `first` in BLEU by more than chance; raises as `score` does."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    sides = {"the first system's hypotheses": first, "the second system's hypotheses": second}
    for hypotheses in sides.values():
        check_streams(hypotheses, references)
    if not allow_pieces:
        for name, lines in (sides | {f"references {i}": r for i, r in enumerate(references, 1)}).items():
            check_detokenised(lines, name, tokenize)
    systems: Any = [("first", list(first)), ("second", list(second))]
    # The metric keeps the references' statistics only if it is given them here.
    metric = BLEU(
        tokenize=tokenize,
        smooth_method=smooth,
        lowercase=lowercase,
        force=True,
        references=[list(r) for r in references],
    )
    test = PairedTest(systems, {"BLEU": metric}, references=None, test_type="bs", n_samples=resamples)
    _, results = test()
    scores: Any = results["BLEU"]
    # sacreBLEU counts the resamples with a difference *greater* than that of the systems: equal ones would be significant.
    p_value = 1.0 if scores[0].score == scores[1].score else float(scores[1].p_value)
    return Comparison(scores[0].score, scores[1].score, p_value, resamples)


def score_name(tokenize: str, smooth: str, lowercase: bool) -> str:
    """The name of a score: plain "BLEU" is the standard one alone."""
    settings = [
        *([tokenize if tokenize != "none" else "tok"] if tokenize != "13a" else []),
        *([smooth if smooth != "none" else "unsmoothed"] if smooth != "exp" else []),
        *(["lc"] if lowercase else []),
    ]
    return "-".join(["BLEU", *settings])


def check_streams(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raises UserError unless there are hypotheses and each stream of references has as many lines."""
    if isinstance(hypotheses, str):
        raise UserError("the hypotheses are one string; want a sequence of lines")
    if not hypotheses:
        raise UserError("there are no hypotheses to score")
    if not references:
        raise UserError("there are no references to score against")
    for number, stream in enumerate(references, 1):
        if isinstance(stream, str):
            raise UserError(
                f"references {number} is one string; want a sequence of lines for each stream of references"
            )
        if len(stream) != len(hypotheses):
            raise UserError(f"{len(hypotheses):,} hypotheses, but references {number} have {len(stream):,} lines")


def check_detokenised(lines: Sequence[str], name: str, tokenize: str) -> None:
    """Raises UserError if `lines` hold subword marks or, where sacreBLEU is to tokenise them, look tokenised already."""
    marked = [n for n, line in enumerate(lines, 1) if _PIECE_MARKS.search(line)]
    if len(marked) > 0.01 * len(lines):
        raise UserError(
            f"{name}: {len(marked) / len(lines):.1%} of the lines hold subword marks (@@ or \u2581), the first is line "
            f"{marked[0]}; join the pieces to words first, or allow them (allow_pieces)"
        )
    if tokenize == "none":
        return
    written = [n for n, line in enumerate(lines, 1) if line.strip()]
    spaced = [n for n in written if _SPACED_END.search(lines[n - 1])]
    if len(spaced) > 0.5 * len(written):
        raise UserError(
            f"{name}: {len(spaced) / len(written):.1%} of the lines have a space before their last full stop, the first is "
            f"line {spaced[0]}; the text is tokenised: detokenise it, score it with tokenize 'none', or allow it (allow_pieces)"
        )
