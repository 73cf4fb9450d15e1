"""What the tests of the evaluation tasks share: the checkout on the path, a tokenizer of bytes, an essay of numbers."""

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[3]))  # `evals` is no part of the installed package


def byte_tokenizer(*, has_bos: bool) -> PreTrainedTokenizerFast:
    """A byte, a token: what a document says can be read back, and its length counted."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab | ({"<s>": 256} if has_bos else {}), []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if not has_bos:
        return PreTrainedTokenizerFast(tokenizer_object=core)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer(has_bos=False)


@pytest.fixture(scope="session")
def bos_tokenizer():
    return byte_tokenizer(has_bos=True)


def number_essay(count):
    """Sentences that say which one they are, in words of letters: no digit comes from the essay."""
    letters = "abcdefghij"
    names = ("".join(letters[int(digit)] for digit in f"{i:04d}") for i in range(count))
    return " ".join(f"Now comes {name} with its friends." for name in names)


@pytest.fixture(scope="session")
def text(tokenizer):
    from evals.tasks.essay import EssayTokens, essay_of_text

    return EssayTokens(essay_of_text("numbers", number_essay(800)), tokenizer)
