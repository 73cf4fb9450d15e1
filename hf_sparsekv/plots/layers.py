"""Pictures of layers side by side: what cutting them costs, what they read, what they keep.

Shapes: L layer.
"""

from typing import TYPE_CHECKING

from hf_sparsekv.errors import InputError, shown
from hf_sparsekv.plan import LayerPlan
from hf_sparsekv.plots.canvas import check_kind, new_figure, whole_numbers
from hf_sparsekv.profile.result import Profile
from hf_sparsekv.scorers.checks import check_int

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def layer_errors(profile: Profile) -> "Figure":
    """What cutting each layer costs its attention output, by budget.

    Args:
        profile: of `hf_sparsekv.profile.measure`.
    Raises:
        InputError: no profile.
    """
    check_kind("profile", profile, Profile)
    figure = new_figure(9.0, 4.5)
    axis = figure.subplots()
    for c, budget in enumerate(profile.budgets):
        colour = f"C{c}" if len(profile.budgets) <= 10 else None
        error = [layer.output_error[c] for layer in profile.layers]
        axis.plot(range(len(error)), error, marker=".", color=colour, label=f"{budget:,}")
    axis.set_xlabel("layer")
    axis.set_ylabel("output error, |cut - dense| / |dense|")
    axis.set(xlim=(-0.5, len(profile.layers) - 0.5), ylim=(0, None))
    whole_numbers(axis.xaxis)
    axis.grid(alpha=0.3)
    axis.legend(title=f"tokens kept\nof {profile.prompt_length:,}", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def layer_magnitudes(profile: Profile) -> "Figure":
    """The largest and the median entry of the residual stream, and where rows look, by layer.

    Args:
        profile: of `hf_sparsekv.profile.measure`.
    Raises:
        InputError: no profile, or one without peaks.
    """
    check_kind("profile", profile, Profile)
    layers = profile.layers
    bare = [layer.layer_idx for layer in layers if not layer.peaks]
    if bare:
        raise InputError(f"the profile has no peaks of layer {bare[0]}: measure the model again")
    figure = new_figure(9.0, 6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot([layer.peaks[0].magnitude for layer in layers], marker=".", label="largest")
    upper.plot([layer.median_magnitude for layer in layers], marker=".", label="median")
    upper.set_yscale("log")
    upper.set_ylabel("residual stream, magnitude")
    near = f"last {profile.local_window} tokens"
    for label, name in ((f"first {profile.config.num_sink_tokens} tokens", "sink_mass"), (near, "local_mass")):
        means = [sum(getattr(head, name) for head in layer.heads) / len(layer.heads) for layer in layers]
        lower.plot(means, marker=".", label=label)
    lower.set_xlabel("layer")
    lower.set_ylabel("softmax weight, mean over heads")
    lower.set(xlim=(-0.5, len(layers) - 0.5), ylim=(0, 1))
    whole_numbers(lower.xaxis)
    for axis in (upper, lower):
        axis.grid(alpha=0.3)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def layer_budgets(plans: dict[str, LayerPlan], length: int) -> "Figure":
    """What each layer keeps under several plans.

    Args:
        plans: by name, of one model.
        length: tokens of the prompt.
    Raises:
        InputError: no plan, or plans of models with different numbers of layers.
        ConfigError: a length that no prompt has.
    """
    check_int("length", length, at_least=1)
    depths = {name: len(plan.layers) for name, plan in plans.items()}
    if not depths:
        raise InputError("no plan to draw: give at least one, by name")
    if len(set(depths.values())) > 1:
        raise InputError(
            f"the plans are of different models, they have {shown(depths)} layers: draw those of one model"
        )
    figure = new_figure(9.0, 4.0)
    axis = figure.subplots()
    for name, plan in plans.items():
        kept = [min(length, spec.kept_tokens(length)) for spec in plan.layers]
        # A step has its layer in the middle; a plan of one layer is a point.
        axis.step(range(len(kept)), kept, where="mid", label=name, marker="." if len(kept) == 1 else None)
    axis.set_xlabel("layer")
    axis.set_ylabel(f"tokens kept of {length:,}")
    axis.set(xlim=(-0.5, len(kept) - 0.5), ylim=(0, None))
    whole_numbers(axis.xaxis)
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
