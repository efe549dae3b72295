"""How much vLLM's engines take of one request.

vLLM's second model runner, its default on GPUs, has room for so much and raises in the worker for more, which
ends the engine and all that it has. The same holds here on every accelerator. What fills these places is
refused with 400 before an engine sees it: by the ingress what can be counted there, by the decode replica all
of it, as its tokenizer has it.
"""

from typing import Final

MOST_TOKEN_IDS: Final = 1024
"""In `allowed_token_ids`, and in `logit_bias`."""
MOST_LOGPROB_TOKEN_IDS: Final = 128
"""In `logprob_token_ids`."""
MOST_STOP_TOKENS: Final = 112
"""In `stop_token_ids`: vLLM has room for 128 with the tokens at which a model ends by itself."""
MOST_BAD_WORDS: Final = 64
"""Texts in `bad_words`: vLLM has room for 128, and looks for each with and without a blank before it."""
MOST_REPEATED_TOKENS: Final = 20
"""Of the longest pattern in `repetition_detection`. The scheduler compares it at every token with all that is
as long as that or shorter, while no engine computes."""
MOST_COMPARED_TOKENS: Final = 80
"""The same pattern as often as it must repeat. Sixteen answers that make each comparison go on for as long as
it can take 0.7 ms of a step then, on a busy core; with patterns of up to 256 tokens they took 63 ms."""
