"""Which sentence pairs a model is trained on. Development and test sets are never filtered."""

from dataclasses import dataclass

import numpy as np

from mtf_experiments.data.token_store import TokenStore

_CHUNK = 1 << 17  # sentences hashed at once


@dataclass(frozen=True)
class PairFilter:
    """Leaves out pairs with an empty side or one that does not fit into a row and, if asked to, others.

    Attributes:
        inputs_length, length: tokens that a source and a target may have.
        max_length_ratio: tokens of the longer side for each of the shorter one, both with their end; 0 for any.
        drop_copies: whether to leave out targets that are their own source.
        drop_duplicates: whether to leave out pairs that occurred before.
    """

    inputs_length: int
    length: int
    max_length_ratio: float = 0.0
    drop_copies: bool = False
    drop_duplicates: bool = False

    def kept(self, inputs: TokenStore, targets: TokenStore) -> tuple[np.ndarray, dict[str, int]]:
        """Numbers of the pairs that are kept, and how many are left out for each reason (the first that applies)."""
        source, target = inputs.lengths, targets.lengths
        reasons = {
            "empty source": source <= 1,
            "empty target": target <= 1,
            "source too long": source > self.inputs_length,
            "target too long": target > self.length,
        }
        if self.max_length_ratio:
            short, long = np.minimum(source, target), np.maximum(source, target)
            reasons["length ratio"] = long > self.max_length_ratio * short
        if self.drop_copies or self.drop_duplicates:
            one, other = sentence_hashes(inputs), sentence_hashes(targets)
            if self.drop_copies:
                reasons["copy"] = one == other
            if self.drop_duplicates:
                _, first = np.unique(one * np.uint64(0x9E3779B97F4A7C15) + other, return_index=True)
                reasons["duplicate"] = np.ones(len(one), bool)
                reasons["duplicate"][first] = False
        kept, counts = np.ones(len(source), bool), {}
        for reason, wrong in reasons.items():
            counts[reason] = int((kept & wrong).sum())
            kept &= ~wrong
        return np.flatnonzero(kept), counts


def sentence_hashes(store: TokenStore) -> np.ndarray:
    """`[sentences]` uint64: equal for equal sentences, practically never for others."""
    result = np.empty(len(store), np.uint64)
    for first in range(0, len(store), _CHUNK):
        offsets = store.offsets[first : first + _CHUNK + 1]
        tokens = np.asarray(store.tokens[offsets[0] : offsets[-1]]).astype(np.uint64)
        lengths = np.diff(offsets)
        place = np.arange(len(tokens)) - np.repeat(offsets[:-1] - offsets[0], lengths)
        mixed = _scrambled((tokens << np.uint64(32)) + place.astype(np.uint64))
        result[first : first + len(lengths)] = np.add.reduceat(mixed, offsets[:-1] - offsets[0])
    return result


def _scrambled(x: np.ndarray) -> np.ndarray:
    """A permutation of 64-bit words without visible structure (the finaliser of SplitMix64)."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
