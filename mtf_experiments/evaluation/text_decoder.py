"""From lines of text to lines of text: prepares the model's inputs, searches batch by batch, and spells the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtf_experiments import mtf
from mtf_experiments.data.text_io import is_blank, one_line
from mtf_experiments.data.tokenizer import EOS, Tokenizer
from mtf_experiments.evaluation.beam_search import beam_search
from mtf_experiments.evaluation.hypotheses import NOTHING, Constraints, Hypotheses
from mtf_experiments.evaluation.sampling import Sampling, sample
from mtf_experiments.evaluation.settings import Decoding
from mtf_experiments.models import parameters
from mtf_experiments.models.incremental import CachedDecoder, encode
from mtf_experiments.models.parameters import Parameters
from mtf_experiments.mtf import Dimension, NamedTensor
from mtf_experiments.training.feed import place_rows, to_host
from mtf_experiments.training.step import Programs

_SHORTEST = 16  # lengths are rounded up to this times a power of two: few programs to compile, little padding


@dataclass(frozen=True)
class Hypothesis:
    """One result. `text` is a single line, of a language model with the prompt that it continues.

    `tokens` are its ids, EOS included where it is `finished`; `log_prob`, of all of them, and `score` are in nats.
    """

    text: str
    log_prob: float
    score: float
    tokens: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Decoded:
    """The results of one line, best first. `truncated`: it had more tokens than the model has positions."""

    source: str
    truncated: bool
    hypotheses: tuple[Hypothesis, ...]

    @property
    def text(self) -> str:
        """The best result."""
        return self.hypotheses[0].text

    def as_json(self, line: int) -> dict[str, Any]:
        """What is told of one line besides its text; `line` counts from 1."""
        best, *others = (asdict(h) for h in self.hypotheses)
        return {"line": line, "source": self.source, "truncated": self.truncated, **best, "others": others}


class TextDecoder:
    """Decodes lines with the parameters of a run, under its mesh and layout.

    A translation model translates each line; a language model continues it. Results are independent of batch size, order
    and company. Programs are compiled once for each rounded pair of lengths. Raises LayoutError if a batch cannot be laid out.
    """

    def __init__(self, programs: Programs, tokenizer: Tokenizer, settings: Decoding) -> None:
        self._programs, self._tokenizer, self.settings = programs, tokenizer, settings
        self._translates = "inputs_length" in programs.settings.lengths
        self._positions = programs.params["embedding/positions"].shape.find("positions").size
        self._batch = Dimension("batch", settings.batch_size)
        self._compiled = cache(self._program)
        programs.check_decoding(settings.batch_size)

    def decode(
        self, params: Parameters, lines: Sequence[str], between: Callable[[], None] = lambda: None
    ) -> list[Decoded]:
        """One result for each of `lines`, in their order. `between` is called before each batch.

        Of lines longer than the model's positions a source loses its end, a prompt its beginning; they are flagged.
        """
        ids = self.encode(lines)
        longest = self._positions if self._translates else self._positions - 1
        truncated = [len(i) > longest for i in ids]
        # A source keeps its EOS, a prompt its end.
        kept = [
            i if not cut else [*i[: longest - 1], EOS] if self._translates else i[-longest:]
            for i, cut in zip(ids, truncated, strict=True)
        ]
        found: list[Decoded | None] = [None] * len(lines)
        for batch in self._batches(kept):
            between()
            for number, hypotheses in zip(batch, self._search(params, batch, kept), strict=True):
                found[number] = Decoded(lines[number], truncated[number], hypotheses)
        return [d for d in found if d is not None]

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids as in training: a source with its EOS, a prompt without."""
        flat, lengths = self._tokenizer.encode_flat(["" if is_blank(line) else line for line in lines])
        ends = np.cumsum(lengths)
        split = [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
        return split if self._translates else [ids[:-1] for ids in split]

    def _batches(self, ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Numbers of the lines of each batch: of like length, except for samples, whose noise goes by line number."""
        order = list(range(len(ids)))
        if self.settings.method == "beam":
            order.sort(key=lambda n: (-len(ids[n]), n))
        for first in range(0, len(order), self._batch.size):
            yield order[first : first + self._batch.size]

    def _search(
        self, params: Parameters, batch: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> list[tuple[Hypothesis, ...]]:
        s, most = self.settings, self._positions
        asked = s.max_length or most
        rows = [ids[n] for n in batch]
        if self._translates:
            limits = [max(1, min(most, asked, int(s.length_factor * len(row)) + s.length_offset)) for row in rows]
        else:
            limits = [min(most, len(row) + asked) for row in rows]
        # Rows that only fill the batch are done before the first step.
        limits += [0] * (self._batch.size - len(rows))
        width = _rounded(max(map(len, rows)), most)
        given = np.zeros((self._batch.size, width), np.int32)
        for row, tokens in enumerate(rows):
            given[row, : len(tokens)] = tokens
        steps = _rounded(max(limits), most)
        arrays = {"given": given, "limits": np.array(limits, np.int32)}
        shapes = {"given": [self._batch, Dimension("inputs_length", width)], "limits": [self._batch]}
        placed = {
            name: place_rows(arrays[name], mtf.Shape(shape), self._programs.sharding) for name, shape in shapes.items()
        }
        key = jax.random.key(s.seed)
        found = self._compiled(width, steps)(params, placed, key, jnp.int32(batch[0]))
        tokens, lengths, finished, log_probs, scores = (to_host(x) for x in found)
        return [
            tuple(
                self._hypothesis(tokens[r, h, : lengths[r, h]], finished[r, h], log_probs[r, h], scores[r, h])
                for h in range(tokens.shape[1])
                if scores[r, h] > NOTHING / 2
            )
            for r in range(len(rows))
        ]

    def _hypothesis(self, tokens: np.ndarray, finished: Any, log_prob: Any, score: Any) -> Hypothesis:
        ids = tokens.tolist()
        text = one_line(self._tokenizer.decode([ids])[0])
        return Hypothesis(text, float(log_prob), float(score), tuple(ids), bool(finished))

    def _program(self, width: int, steps: int) -> Callable[..., Hypotheses]:
        """The compiled search of a batch of `width` given tokens and up to `steps` positions."""
        s, programs = self.settings, self._programs
        beam, positions = Dimension("beam", s.beam), Dimension("steps", steps)

        def search(params: Parameters, given: dict[str, NamedTensor], key: jax.Array, first: jax.Array) -> Hypotheses:
            model = parameters.merge(programs.structure, params)
            memory = prefix = None
            shortest: int | NamedTensor = s.min_length
            if self._translates:
                memory = encode(model, given["given"])
            else:
                prompt = mtf.rename(given["given"], inputs_length="steps")
                shortest = mtf.reduce_sum(mtf.not_equal(prompt, 0).astype(jnp.int32), "steps") + s.min_length
                prefix = _padded(prompt, positions)
            decoder = CachedDecoder(model, self._batch, beam, positions, memory)
            constraints = Constraints(given["limits"], self._tokenizer.vocab_size, shortest, prefix)
            if s.method == "beam":
                return beam_search(decoder, constraints, s.alpha, s.n_best)
            random = mtf.Random(key).fold("sample").window("batch", first, 1 << 30)
            found = sample(decoder, constraints, Sampling(s.temperature, s.top_k, s.top_p), random)
            return Hypotheses(*(mtf.slice_dimension(x, "n_best", 0, s.n_best) for x in found))

        return mtf.spmd(search, programs.mesh, programs.lenient_layout)


def _padded(x: NamedTensor, dim: Dimension) -> NamedTensor:
    """`x` made as long as `dim`, of the same name, with zeros or by leaving out what is beyond."""
    size = x.shape.find(dim.name).size
    if size >= dim.size:
        return mtf.slice_dimension(x, dim.name, 0, dim.size)
    more = [Dimension(d.name, dim.size - size) if d.name == dim.name else d for d in x.shape]
    return mtf.concat([x, mtf.zeros(more, x.dtype)], dim.name)


def _rounded(length: int, most: int) -> int:
    """`length` rounded up to `_SHORTEST` times a power of two, at most `most`."""
    rounded = _SHORTEST
    while rounded < length:
        rounded *= 2
    return min(rounded, most)
