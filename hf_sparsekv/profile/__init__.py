"""What a model does with its cache, measured on the user's own text, and the layer plan that follows from it.

A text is a prompt and a held-out continuation. The prompt is read once, densely; every layer selects at its end as the
configured scorer would; then the continuation's rows tell what the selection costs. No attention matrix is ever stored:
rows are taken in chunks whose temporaries are bounded.

    texts = skv.profile.prompts_of(text, tokenizer=tokenizer, vocab_size=49152, length=2048 + 64, max_texts=4)
    recited = skv.profile.recall_texts(texts, num_held_out=64, lead=config.observation_window)
    profile = skv.profile.measure(model, torch.cat([texts, recited]), config=config, max_texts=8)
    plan = skv.profile.make_plan(profile, target_bytes=..., element_bytes=2)
    config = skv.SparseKVConfig(budget_shape="calibrated", plan=plan)

`hf-sparsekv plan --calibrate` does just that. A plan is as good as its texts: measured on plain prose alone it starves
the layers that look things up (`evals/results/budget_shapes_*.json`), which is what the recited texts are for.
"""

from hf_sparsekv.profile.activations import Surface, activation_surface
from hf_sparsekv.profile.allocation import OBJECTIVES, allocate, check_target, make_plan, summed_error
from hf_sparsekv.profile.attention import attention_pattern
from hf_sparsekv.profile.measure import DEFAULT_HELD_OUT, ladder_of, measure
from hf_sparsekv.profile.result import HeadProfile, LayerProfile, Peak, Profile
from hf_sparsekv.profile.selection import Selection, prompt_selection
from hf_sparsekv.profile.texts import prompts_of, recall_texts

__all__ = [
    "DEFAULT_HELD_OUT",
    "OBJECTIVES",
    "HeadProfile",
    "LayerProfile",
    "Peak",
    "Profile",
    "Selection",
    "Surface",
    "activation_surface",
    "allocate",
    "attention_pattern",
    "check_target",
    "ladder_of",
    "make_plan",
    "measure",
    "prompt_selection",
    "prompts_of",
    "recall_texts",
    "summed_error",
]
