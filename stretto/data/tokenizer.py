"""Documents to token numbers: by a tokenizer file or a Hugging Face tokenizer, or byte by byte where none is named."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from stretto.data.text import TokenStream, bytes_stream, refused
from stretto.errors import JobError

GIVE = "give a tokenizer.json, a model folder, or a name on the Hugging Face hub"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # what tokenizer files call the end of a document


def encode(documents: Iterable[str], tokenizer: str | None, asked: str) -> TokenStream:
    """All documents as one stream, each ended by the tokenizer's end-of-text token (bytes: a newline).

    The whole text is turned into tokens here and now, on every rank: for more than some hundred megabytes of text do it once,
    save the numbers, and give tokens:FILES.
    """
    import numpy as np

    if tokenizer is None:
        return bytes_stream("".join(document + "\n" for document in documents).encode())
    to_ids, end = load(tokenizer, asked)
    ids = array("I")
    for document in documents:
        ids.extend(to_ids(document))
        ids.extend([] if end is None else [end])
    return TokenStream((np.frombuffer(ids, np.uint32),) if ids else ())


def load(tokenizer: str, asked: str) -> tuple[Callable[[str], list[int]], int | None]:
    """(text -> token numbers, the end-of-text token or None) of a tokenizer.json, a folder, or a name on the hub."""
    path = Path(tokenizer).expanduser()
    if tokenizer.startswith((".", "/", "~")) and not path.exists():
        raise JobError(f'data.tokenizer="{tokenizer}": no such file or folder; {GIVE}')
    try:
        return from_file(path) if path.is_file() else from_transformers(tokenizer)
    except ImportError as error:
        raise refused(asked, f"data.tokenizer needs {error.name}, which is not here", 'pip install "stretto[hf]"') from error
    except Exception as error:  # the libraries raise many kinds, down to bare Exception
        reason = "".join(str(error).strip().splitlines()[:1])
        raise JobError(f'data.tokenizer="{tokenizer}" cannot be loaded: {reason}; {GIVE}') from error


def from_file(path: Path) -> tuple[Callable[[str], list[int]], int | None]:
    """A tokenizer.json, read by the tokenizers library alone."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path))
    return (lambda text: list(found.encode(text, add_special_tokens=False).ids)), next(
        (i for i in map(found.token_to_id, ENDS) if i is not None), None
    )


def from_transformers(name: str) -> tuple[Callable[[str], list[int]], int | None]:
    """Whatever transformers knows under this name or finds in this folder."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(name)
    return (lambda text: list(found(text, add_special_tokens=False, verbose=False)["input_ids"])), found.eos_token_id
