"""`hf-sparsekv demo`: a long document that every Python has, one question, both caches side by side.

What brings torch is imported inside the command: `--help` does without those seconds.
"""

from functools import partial
from pydoc_data.topics import topics
from typing import Annotated

import typer
from rich.console import Console

from hf_sparsekv.cli.generate import generation_options
from hf_sparsekv.cli.interrupt import importing
from hf_sparsekv.models_store import BUILTIN_ALIAS

TOPIC = "string-methods"
DOCUMENT_CHARACTERS = 13_000
"""About 3,400 tokens: the built-in model reads well up to 4,000."""
QUESTION = (
    "Which method returns a copy of the string with its first character capitalized and the rest lowercased? "
    "Answer briefly."
)
EXPECTED = "str.capitalize"
DEMO_BUDGET = 640
DEMO_PRESET = "question-in-window"
MAX_NEW_TOKENS = 32


def demo(
    budget: Annotated[int, typer.Option(help="Tokens that a window layer keeps.")] = DEMO_BUDGET,
) -> None:
    """Answer a question about a chapter of Python's own reference, with the dense and with the sparse cache."""
    with importing():
        from hf_sparsekv import SparseKVConfig
        from hf_sparsekv.cli.loading import load_weights, open_model
        from hf_sparsekv.cli.session import answer_each, comparison_table, encode_prompt, report_lines
        from hf_sparsekv.hf.models import model_shape
        from hf_sparsekv.plan import LayerPlan

    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=True)
    config = SparseKVConfig(preset=DEMO_PRESET, budget=budget)
    source = open_model(BUILTIN_ALIAS, trust_remote_code=False, console=console)
    ids = encode_prompt(source.tokenizer, QUESTION, document(), use_chat=True)
    say(f"document  Python's language reference, topic {TOPIC!r}, {ids.shape[1]:,} tokens with the question")
    say(f"question  {QUESTION}\n")
    plan = LayerPlan.build(config, model_shape(source.config))
    say("planned for the prompt alone (the runs below add the answers' tokens)")
    say(plan.describe(ids.shape[1], element_bytes=4) + "\n")
    model = load_weights(source, dtype="float32", device="auto", console=console)
    options = generation_options(source.tokenizer.pad_token_id, model, MAX_NEW_TOKENS, 0.0)
    options |= {"seed": 0, "with_dense": True, "is_silent": True}
    answers = answer_each(model, source.tokenizer, ids, config, console, **options)
    console.print(comparison_table(answers))
    report = answers[1].report
    assert report is not None
    say(report_lines(report))
    for answer in answers:
        verdict = "right" if EXPECTED in answer.text.lower() else "wrong"
        say(f"{answer.kind:<7} answer is {verdict} (it should name {EXPECTED})")


def document() -> str:
    """The first part of the topic, up to the last whole paragraph."""
    text: str = topics[TOPIC][:DOCUMENT_CHARACTERS]
    return text[: text.rindex("\n\n")]
