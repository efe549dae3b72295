"""The conversion of the embedded GGUF file into a directory of float32 safetensors that vLLM serves.

Owns: what is written for the model and its tokenizer, and the program that does it in a process of its own
(`python conversion.py SOURCE DESTINATION`). Does not own: where SOURCE comes from, starting that process
(both in `embedded`), and putting DESTINATION into its place (`store`).

It runs by its path, so it imports nothing from this project. It speaks to its parent in three ways:
one JSON object per step on standard output, `{"stage": str, "fraction": float}`; exit status
`DISK_FULL_STATUS` when the disk is full; and it exits as soon as its standard input closes, so that it never
outlives its parent.
"""

import errno
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the fraction done, from 0 to 1."""

DISK_FULL_STATUS: Final = errno.ENOSPC
_DISK_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def convert(source: Path, destination: Path, progress: ProgressCallback) -> None:
    """Write `source` (SmolLM2 in GGUF) to the existing directory `destination` as a Hugging Face model.

    Imports torch and transformers, and takes about 2 GB of memory.
    """
    progress("Loading transformers", 0.0)
    import torch  # noqa: PLC0415 - seconds and hundreds of megabytes, for one conversion
    from transformers import GgufConfig, LlamaForCausalLM  # noqa: PLC0415

    progress("Unpacking the weights", 0.5)
    # Without dequantize, config.json would keep a quantization_config for a GGUF file that is not there.
    model = LlamaForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    progress("Writing the weights", 0.9)
    model.save_pretrained(destination)
    progress("Writing the tokenizer", 0.95)
    write_tokenizer(source, destination, model.config.max_position_embeddings)
    progress("Converted", 1.0)


def write_tokenizer(source: Path, destination: Path, context_tokens: int) -> None:
    """Write the tokenizer and the chat template that the GGUF file carries.

    transformers reads any GPT-2 style GGUF vocabulary with a plain byte-level pre-tokenizer. SmolLM2's
    (`tokenizer.ggml.pre` = "smollm") splits single digits off first; without that, white space before a
    number joins it and gives tokens that the model was not trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = context_tokens
    tokenizer.save_pretrained(destination)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that the disk (or the user's quota) is full.

    safetensors reports it as its own error type, with the system's message in the text.
    """
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
        return True
    if any(os.strerror(code) in str(error) for code in _DISK_FULL_ERRNOS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_disk_full(cause)


def main(source: Path, destination: Path) -> int:
    """Convert, reporting to the parent process. Returns the exit status."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _parse_once()
    # What a library prints goes to standard error, where it cannot be mistaken for a step.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(stage: str, fraction: float) -> None:
        reports.write(json.dumps({"stage": stage, "fraction": fraction}) + "\n")

    try:
        convert(source, destination, report)
    except Exception as error:
        if is_disk_full(error):
            return DISK_FULL_STATUS
        raise
    return 0


def _parse_once() -> None:
    """Have gguf keep what it parses, for the whole process.

    transformers parses the file's header three times, and builds the map of tensor names once for each of
    the model's 400 modules: a third of the conversion's time.
    """
    import gguf  # noqa: PLC0415

    vars(gguf).update(
        GGUFReader=functools.cache(gguf.GGUFReader),
        get_tensor_name_map=functools.cache(gguf.get_tensor_name_map),
    )


def _exit_with_parent() -> None:
    """Wait for standard input to close, which the kernel does however the parent ends."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
