"""A transformers model, unmodified, on two ranks with ZeRO 3 and recompute. Needs stretto[hf]; downloads nothing.

    python examples/hf_model.py
    torchrun --nproc_per_node 2 examples/hf_model.py

From the command line: stretto train model=hf:FOLDER_OR_ID data=text:FILE mesh="dp=2" zero=3
"""

import os
from pydoc_data.topics import topics

import torch
from torch import nn

import stretto

# device="cpu": two processes of any machine. Leave it out for one GPU a rank.
job = stretto.Job(
    mesh="dp=2", zero=3, recompute="full", batch={"size": 8, "seq_len": 64}, optimizer={"lr": 3e-3}, schedule="constant", device="cpu"
)


def model() -> nn.Module:
    """A small one from a config, with 256 token ids: one a byte. from_pretrained(FOLDER) works as well."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here: the process that only starts the ranks needs none of it

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, use_cache=False, **sizes))


def batch(step: int) -> dict[str, torch.Tensor]:
    """Eight pieces of the text that ships with Python, as bytes. labels as in transformers: not shifted, -100 does not count."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - 64, (8,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([text[start : start + 64] for start in starts])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    """What each rank runs."""
    held_out = [batch(step) for step in range(1000, 1004)]
    with stretto.Engine(model(), job) as engine:
        before = engine.evaluate(held_out)["loss"]
        for step in range(30):
            engine.step(batch(step))
        after = engine.evaluate(held_out)["loss"]
        weights = dict(engine.full_state())  # under the names that transformers gave them; whole on rank 0, None elsewhere
    if engine.world.rank == 0:
        print(f"loss on new text {before:.3f} -> {after:.3f}: {'it learned' if after < before - 1.5 else 'it did not learn'}")
        plain = model()
        plain.load_state_dict(weights)  # a plain transformers model again, to save or to use
        with torch.no_grad():
            losses = [plain(**new).loss.item() for new in held_out]
        print(f"the plain model with these weights: {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        stretto.launch(main, ranks=2)
