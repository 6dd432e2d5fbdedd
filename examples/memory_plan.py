"""Plan the memory of a training step before anything runs, for a GPU that need not be here.

    python -m examples.memory_plan llama-3.1-8b --output-dir runs/memory_plan

The plan chooses what each layer keeps for backward, so that a step fits the budget and is as fast
as it can be there. The step is simulated without weights: the sizes are those of a preset or of a
checkpoint's config.
"""

from pathlib import Path

from examples.command import call, report
from ligermodels.converters.hub import resolve
from ligermodels.memory.plan import LayerPlan
from ligermodels.models.auto import families, family_of
from ligermodels.training.model import outlook


def main(
    model: str,
    output_dir: Path,
    *,
    batch: int = 8,
    seq: int = 2048,
    budget: str = "66GiB",
    gpu: str = "H100",
) -> dict[str, float]:
    """Plan for a model in bfloat16 with AdamW; draw the plan and return its prediction."""
    family = next((x for x in families().values() if model in x.config_class.presets), None)
    if family is not None:
        config = family.config_class.preset(model)
    else:
        folder = resolve(model, weights=False)
        family = family_of(folder)
        config = family.config_class.from_hf(folder)
    found = outlook(family, config, batch, seq, budget=budget, gpu=gpu, precision="bf16")
    if found.plan is None:
        raise SystemExit(f"{budget}: at least {found.least_bytes / 2**30:.1f} GiB are needed")
    output_dir.mkdir(parents=True, exist_ok=True)
    found.plan.plot().savefig(output_dir / "picture.png", dpi=110)
    print(found.plan.bars())
    said = found.plan.prediction
    return report(
        output_dir,
        layers=len(found.plan.layers),
        whole=sum(layer == LayerPlan() for layer in found.plan.layers),
        predicted_peak=said.peak_bytes / 2**30,
        budget=found.budget / 2**30,
        least=found.least_bytes / 2**30,
        largest_batch=found.largest_batch,
        longest_row=found.largest_seq,
    )


if __name__ == "__main__":
    call(main, __doc__)
