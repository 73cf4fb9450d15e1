"""A prompt that is longer than the model takes: our error says so, and no warning of the tokenizer comes before it."""

import logging
from types import SimpleNamespace

import pytest

import hf_sparsekv as skv
from hf_sparsekv.cli.run import chat_template
from hf_sparsekv.cli.session import encode_prompt
from hf_sparsekv.testing.models import byte_tokenizer, tiny_llama

TOO_LONG = "a" * 5000


@pytest.fixture
def tokenizer():
    """Of a model that takes few tokens; with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 100
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


@pytest.fixture
def said():
    """What transformers' tokenizers log."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_transformers_warns_where_it_is_asked_itself(tokenizer, said):
    tokenizer(TOO_LONG)
    assert len(said) == 1


def test_generate_says_it_alone(tokenizer, said):
    with pytest.raises(skv.InputError, match=r"the prompt has 5000 tokens .* the model takes 4096 in all"):
        skv.generate(tiny_llama(), TOO_LONG, tokenizer=tokenizer)
    assert said == []


def test_the_engine_says_it_alone(tokenizer, said):
    options = skv.EngineConfig(kv_memory_bytes=2**26, max_num_seqs=2)
    with skv.Engine(tiny_llama(), engine_config=options, tokenizer=tokenizer) as engine:
        (output,) = engine.generate([TOO_LONG])
    assert "has 5000 prompt tokens" in output.error
    assert said == []


@pytest.mark.parametrize("use_chat", [False, True])
def test_the_command_line_says_it_alone(tokenizer, said, use_chat):
    assert encode_prompt(tokenizer, TOO_LONG, None, use_chat=use_chat).shape == (1, 5000)
    messages = [{"role": "user", "content": TOO_LONG}]
    assert len(chat_template(SimpleNamespace(tokenizer=tokenizer))(messages)) == 5000
    assert said == []
