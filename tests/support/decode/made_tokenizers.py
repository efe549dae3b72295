"""Tokenizers of the two kinds whose tokens are bytes, small enough to be made for a test."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = "Grüße, 世界! 👩‍🚀🚀😀 naïve café … Ελληνικά 日本語 한국어 कक्षा a quick brown fox"


def across_characters():
    """Each byte is a token, and so are many that begin or end within a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    swapped = "".join(reversed(TEXT))
    made.train_from_iterator(
        [TEXT * 3, swapped * 3], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.add_tokens(["<think>", "</think>", "<0x80>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def by_bytes(*more):
    """What is no word is a token for each byte, as in Llama 2, and the decoder takes a run of them whole."""
    words = ["<unk>", "<s>", "▁", "▁a", "▁the", "b", BROKEN, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    made.add_special_tokens(["<s>"])
    made.add_tokens(["<think>", "</think>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
