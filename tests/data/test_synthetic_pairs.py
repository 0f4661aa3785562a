from mtf_experiments.data.pair_sources import pair_lines
from mtf_experiments.data.synthetic_pairs import SyntheticPairSource

SOURCE = SyntheticPairSource(train_pairs=2000, validation_pairs=100, test_pairs=100, max_words=20)


def pairs(source, split):
    return list(pair_lines(source, split))


def test_pairs_follow_from_the_seed():
    again = SyntheticPairSource(train_pairs=2000, validation_pairs=100, test_pairs=100, max_words=20)
    assert pairs(again, "test") == pairs(SOURCE, "test")
    assert again.inputs.signature("test") == SOURCE.inputs.signature("test") != SOURCE.targets.signature("test")
    other = SyntheticPairSource(seed=1, train_pairs=2000, validation_pairs=100, test_pairs=100)
    assert pairs(other, "test") != pairs(SOURCE, "test")


def test_the_other_splits_are_not_in_training():
    train = {a for a, _ in pairs(SOURCE, "train")}
    held = [a for split in ("validation", "test") for a, _ in pairs(SOURCE, split)]
    assert not train & set(held) and 180 < len(held) < 200  # a few of 200 are too long
    left_out = 2000 - len(pairs(SOURCE, "train"))
    assert 0 < left_out < 400 and f"{left_out:,} sentences" in SOURCE.notes[0]
    assert max(len(a.split()) for split in SOURCE.splits for a, _ in pairs(SOURCE, split)) == SOURCE.max_words


def test_translation_is_by_lexicon_order_and_agreement():
    grammar = SOURCE._grammar
    opener, topic = grammar.openers[5], int(grammar.opener_topic[5])
    (ambiguous, *_), (swaps, *_), (last, *_), (plain, *_) = grammar.words[:4]
    line = " ".join([opener, swaps, ambiguous, last, plain])
    spelled = {word: word[::-1] + "o" for word in (opener, swaps, last, plain)}
    expected = [
        spelled[opener],
        f"{ambiguous[::-1]}o{topic}",
        spelled[swaps],
        spelled[plain],
        spelled[last],
        f"zu{topic}",
    ]
    assert SOURCE.translate(line) == " ".join(expected)
    assert SOURCE.translate(f"{opener} {swaps}") == f"{spelled[opener]} {spelled[swaps]} zu{topic}"


def test_a_translation_has_one_word_more_and_the_languages_share_none():
    found = pairs(SOURCE, "train")
    assert all(len(b.split()) == len(a.split()) + 1 for a, b in found)
    words = [{w for pair in found for w in pair[side].split()} for side in (0, 1)]
    assert not words[0] & words[1]
    assert all(SOURCE.translate(a) == b for a, b in found[:50])


def test_the_opener_is_needed_and_word_order_differs():
    """Without the opener an ambiguous word cannot be translated; most sentences are not translated word by word."""
    found = pairs(SOURCE, "train")
    (word, *_) = SOURCE._grammar.words[0]
    endings = {w[-1] for a, b in found if word in a.split() for w in b.split() if w.startswith(f"{word[::-1]}o")}
    assert len(endings) == SOURCE.topics
    moved = sum(
        [w[: len(v)] == v[::-1] for v, w in zip(a.split(), b.split(), strict=False)] != [True] * len(a.split())
        for a, b in found
    )
    assert moved > len(found) / 2
