"""megatron-core: its GPTModel in place of the built-in decoder, with tensor and pipeline parallelism and the distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.adapters import megatron_cpu
from stretto.adapters.ability import shape_of
from stretto.adapters.runner import Setting, Told
from stretto.anatomy import DecoderShape
from stretto.data.batch import NOT_COUNTED, Batch, count_targets, prepare_labels
from stretto.engine.optimizer import lr_factor
from stretto.models.decoder import Decoder, initial

#: A parameter of a megatron block -> (those of ours it is made of, the dim that tp cuts; None: whole on every rank).
BLOCK: dict[str, tuple[tuple[str, ...], int | None]] = {
    "input_layernorm.weight": (("norm1.weight",), None),
    "input_layernorm.bias": (("norm1.bias",), None),
    "self_attention.linear_qkv.weight": (("attn.q.weight", "attn.k.weight", "attn.v.weight"), 0),
    "self_attention.linear_qkv.bias": (("attn.q.bias", "attn.k.bias", "attn.v.bias"), 0),
    "self_attention.linear_proj.weight": (("attn.o.weight",), 1),
    "self_attention.linear_proj.bias": (("attn.o.bias",), None),
    "pre_mlp_layernorm.weight": (("norm2.weight",), None),
    "pre_mlp_layernorm.bias": (("norm2.bias",), None),
    "mlp.linear_fc1.weight": (("mlp.gate.weight", "mlp.up.weight"), 0),
    "mlp.linear_fc1.bias": (("mlp.gate.bias", "mlp.up.bias"), 0),
    "mlp.linear_fc2.weight": (("mlp.down.weight",), 1),
    "mlp.linear_fc2.bias": (("mlp.down.bias",), None),
}
ENDS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "embedding.word_embeddings.weight": (("embed.weight",), 0),
    "embedding.position_embeddings.weight": (("positions.weight",), None),
    "decoder.final_layernorm.weight": (("norm.weight",), None),
    "decoder.final_layernorm.bias": (("norm.bias",), None),
    "output_layer.weight": (("head.weight",), 0),
}


class Megatron:
    """A step is megatron's own schedule over the microbatches, then its optimizer."""

    counts_bytes = False

    def __init__(self, setting: Setting) -> None:
        if setting.device.type == "cpu":
            megatron_cpu.pretend()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if setting.device.type == "cpu":
            megatron_cpu.after_import()
        self.setting, job, mesh = setting, setting.job, setting.mesh
        shape = shape_of(job)
        assert shape is not None, "refused by the catalog"
        low = job.precision.compute == "bf16"
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh["tp"], pipeline_model_parallel_size=mesh["pp"], create_gloo_process_groups=False
        )
        tensor_parallel.random.model_parallel_cuda_manual_seed(job.seed)
        self.config: Any = configuration(setting, shape)
        model: Any = _model(self.config, shape, job.batch.seq_len, mesh.at(setting.rank)["pp"], mesh["pp"])
        fill(model, shape, setting)
        model = model.to(torch.bfloat16) if low else model
        distributed = job.zero.stage > 0
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=job.microbatches == 1 and mesh["pp"] == 1 and setting.device.type != "cpu",
        )
        self.model: Any = DistributedDataParallel(self.config, options, model)
        keys = job.optimizer
        self.optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=keys.lr,
                weight_decay=keys.weight_decay,
                adam_beta1=keys.betas[0],
                adam_beta2=keys.betas[1],
                adam_eps=keys.eps,
                clip_grad=job.clip,
                bf16=low,
                params_dtype=torch.bfloat16 if low else torch.float32,
                use_distributed_optimizer=distributed,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        for group in self.optimizer.param_groups:
            group["fused"] = True  # torch's fused update in place of the fused kernel that it takes from apex on a GPU
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        self.run: Any = get_forward_backward_func()
        self.total, self.done, self.count = job.schedule.steps or job.total_steps() or 1, 0, 1

    def step(self, batch: Batch) -> Told:
        """See Runner. Megatron divides a loss by the number of microbatches, and gradients by the dp ranks."""
        whole, job = prepare_labels(batch), self.setting.job
        self.count = max(count_targets(whole), 1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows = self.setting.rows(whole)
        losses: list[Tensor] = self.run(
            forward_step_func=self._forward,
            data_iterator=iter(rows.microbatches(job.microbatches)),
            model=[self.model],
            num_microbatches=job.microbatches,
            seq_length=job.batch.seq_len,
            micro_batch_size=rows.rows // job.microbatches,
            forward_only=False,
        )
        for group in self.optimizer.param_groups:  # as its scheduler of parameters does
            group["lr"] = job.optimizer.lr * lr_factor(job.schedule, self.done, self.total)
            group["weight_decay"] = job.optimizer.weight_decay * group.get("wd_mult", 1.0)
        _, norm, _ = self.optimizer.step()
        self.done += 1
        told = float(sum(float(loss) for loss in losses)) / self.count if self.setting.counts_loss else 0.0
        return Told(told, None if not job.clip or norm is None else float(norm))

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        rows = next(batches)
        targets = rows["shift_labels"]
        counted = targets != NOT_COUNTED
        tokens = rows["input_ids"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output: Tensor = model(tokens, positions, None, labels=targets.where(counted, 0))

        def loss(each: Tensor) -> tuple[Tensor, Tensor]:
            total = (each.float() * counted).sum()
            job = self.setting.job
            return total * (self.setting.shards * job.microbatches / self.count), total.detach()

        return output, loss

    def close(self) -> None:
        """Nothing to end."""


def configuration(setting: Setting, shape: DecoderShape) -> Any:
    """The decoder and the mesh in megatron's words. Fused kernels off: they are for GPUs."""
    from megatron.core.transformer import TransformerConfig

    job, mesh = setting.job, setting.mesh
    full = job.recompute == "full"
    low = job.precision.compute == "bf16"
    dtype = torch.bfloat16 if low else torch.float32
    return TransformerConfig(
        num_layers=shape.blocks,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=shape.mlp == "swiglu",
        activation_func=F.silu if shape.mlp == "swiglu" else F.gelu,
        add_bias_linear=shape.bias,
        normalization="RMSNorm" if shape.norm == "rms" else "LayerNorm",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=True,  # it marks there which weights tp cuts; without, norms of gradients miss those of other ranks
        tensor_model_parallel_size=mesh["tp"],
        pipeline_model_parallel_size=mesh["pp"],
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=low,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if full else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
    )


def _model(config: Any, shape: DecoderShape, seq_len: int, stage: int, stages: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=shape.vocab,
        max_sequence_length=shape.positions or seq_len,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="learned_absolute" if shape.position == "learned" else "rope",
        rotary_base=int(shape.rope_theta),
    )


# -- parameters ---------------------------------------------------------------------------------------------------------


def fill(model: nn.Module, shape: DecoderShape, setting: Setting) -> None:
    """Give every parameter the values that the decoder has under its own names: megatron's part of them on this rank."""
    ours, tp = Decoder(shape, device="meta"), setting.mesh["tp"]
    index, first = setting.mesh.at(setting.rank)["tp"], setting.mesh.at(setting.rank)["pp"] * (shape.blocks // setting.mesh["pp"])
    known = dict(ours.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        sources, dim = _source(name, first)
        parts = [_values(ours, source, known[source], setting.job.seed) for source in sources if source in known]
        if "linear_qkv" in name:
            whole = _by_groups(parts, shape)
        elif "linear_fc1" in name:  # each rank has its part of the gate above its part of the rest
            whole = torch.cat([torch.cat([part.chunk(tp)[i] for part in parts]) for i in range(tp)])
        else:
            (whole,) = parts
        mine = whole if dim is None else whole.chunk(tp, dim)[index]
        assert mine.shape == parameter.shape, (name, mine.shape, parameter.shape)
        parameter.data.copy_(mine)


def _source(name: str, first: int) -> tuple[tuple[str, ...], int | None]:
    """Our names of what a megatron parameter is made of. first: the number of the first block here."""
    if name in ENDS:
        return ENDS[name]
    _, _, number, leaf = name.split(".", 3)
    sources, dim = BLOCK[leaf]
    return tuple(f"layers.{first + int(number)}.{source}" for source in sources), dim


def _values(ours: Decoder, name: str, like: Tensor, seed: int) -> Tensor:
    out = torch.empty(like.shape)
    initial(ours, name, out, 0, seed)
    return out


def _by_groups(parts: list[Tensor], shape: DecoderShape) -> Tensor:
    """q, k and v as megatron keeps them: of each kv head its queries, then its key, then its value."""
    q, k, v = (part.unflatten(0, (shape.kv_heads, -1)) for part in parts)
    return torch.cat((q, k, v), dim=1).flatten(0, 1)


def build(setting: Setting) -> Megatron:
    """See Build."""
    return Megatron(setting)
