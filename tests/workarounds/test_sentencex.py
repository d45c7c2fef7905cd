"""What sentencex does that `data_prep/text/sentences.py` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import time

import sentencex


def test_sentencex_takes_an_unknown_language_for_english() -> None:
    text = "Dr. Who came. He left."
    assert sentencex.segment("qqq", text) == sentencex.segment("en", text), (
        "check_language of text/sentences.py and its lists of languages may be taken out"
    )


def test_sentencex_ends_no_sentence_at_a_full_width_stop_before_a_digit() -> None:
    texts = [f"\u4ed6\u5b66{stop}1934\u5e74" for stop in "\u3002\uff01\uff1f\uff61"]
    assert all(len(sentencex.segment("zh", text.replace("1", "\uff11"))) == 2 for text in texts)
    assert any(len(sentencex.segment("zh", text)) == 1 for text in texts), (
        "_DIGIT_OF_A_SENTENCE and _FULL_WIDTH_STOPS of text/sentences.py may be taken out"
    )


def test_sentencex_takes_time_in_the_square_of_a_text_without_spaces() -> None:
    def seconds(num_sentences: int) -> float:
        text = "\u6cb3\u6d41\u7a7f\u8fc7\u6751\u5e84\u3002" * num_sentences
        times = []
        for _ in range(3):
            started_at = time.thread_time()
            sentencex.segment("zh", text)
            times.append(time.thread_time() - started_at)
        return min(times)

    assert seconds(8_000) > 20 * seconds(1_000), "_split_in_windows of text/sentences.py may be taken out"
