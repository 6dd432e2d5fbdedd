"""Experts: a factor in the loss keeps the routers from choosing the same ones again and again.

    python -m examples.experts build/smollm2 --output-dir runs/experts

Two small Mixtrals learn a novel from scratch, with the tokenizer of the model and the same batches:
one with the loss that balances the experts, and one without. The picture shows, at each step, how
many tokens the busiest expert of a layer gets, over the mean of its layer.

`loss_with` has the balance in it, so it is larger than the loss of the text alone.
"""

from pathlib import Path

from examples.command import TRAIN, call, draw_losses, report, tune
from ligermodels import Tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main(
    model: str, output_dir: Path, *, balance: float = 0.05, **options: object
) -> dict[str, float]:
    """Train both, and return the loads of the busiest experts at the end."""
    settings: dict = {"batch_size": 4, "seq_len": 64, "max_steps": 60, "learning_rate": 3e-3}
    sizes = SIZES | {"vocab_size": len(Tokenizer.from_hf(model)), "head_dim": 16}
    loads, numbers = {}, {}
    for name, factor in (("without", 0.0), ("with", balance)):
        result = tune(
            "mixtral-8x7b-v0.1",
            output_dir / name,
            TRAIN,
            None,
            from_scratch=True,
            tokenizer=model,
            config_overrides=[f"{key}={value}" for key, value in sizes.items()],
            router_aux_loss_coef=factor,
            **settings | options,
        )
        loads[f"{name} a balance loss"] = [row["expert_load_max"] for row in result.metrics]
        last = loads[f"{name} a balance loss"][-10:]
        numbers |= {name: sum(last) / len(last), f"loss_{name}": float(result.loss or 0)}
    draw_losses(output_dir, "the busiest of 8 experts", loads, "tokens over the mean")
    return report(output_dir, **numbers, steps=result.steps)


if __name__ == "__main__":
    call(main, __doc__)
