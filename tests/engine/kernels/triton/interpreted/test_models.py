"""Models with Triton's kernels, compared with transformers: families with different kinds of attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from stoker_engine import LLM, SamplingParams
from stoker_engine.attention.triton import TritonBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.layers.build import Build
from stoker_engine.models import decoder_loader
from stoker_engine.models.checkpoint import find_checkpoint
from stoker_engine.models.decoder import Decoder
from stoker_engine.models.loading.stored_weights import stored_weights
from stoker_engine.quant.blocks import BlockMatrix
from stoker_engine.sizing.weight_sizes import weight_bytes

from .....support.engine.gguf_random import quantized
from .....support.engine.tiny_configs import GGUF
from .....support.engine.tiny_models import prompts, random_model, reference_of, tiny_family, tiny_mixture
from ....models import llama_cpp
from ....models.conftest import PagedRun, assert_run_is, load_decoder
from ....models.test_gpt_oss import _save as save_gpt_oss
from ....models.test_gpt_oss import unquantized

#: A window, a soft cap, ALiBi, shared and separate KV heads, odd head sizes.
FAMILIES = ["gemma2", "falcon rw", "llama", "mistral", "gemma3", "cohere2", "bloom", "mpt clip", "opt 350m", "gptj"]
#: Families that take minutes; gemma2 also has a window.
LONG = ("gemma3", "cohere2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow(drawn=name not in LONG)] * (number > 0))
        for number, name in enumerate(FAMILIES)
    ],
)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny_family(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, backend=TritonBackend(), kernels=TRITON)
    assert_run_is(PagedRun(ours, prompts(2), new_tokens=6), reference_of(theirs))


@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "dbrx", "qwen2_moe"))]
)
def test_mixture_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny_mixture(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, backend=TritonBackend(), kernels=TRITON)
    assert_run_is(PagedRun(ours, [[5, 17, 99, 3, 64, 2, 31], [8]], new_tokens=3), reference_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [False, True])
def test_gpt_oss_equals_transformers(in_blocks: bool, tmp_path: Path) -> None:
    """Biases of experts, and clamped gates; unquantized and in MXFP4."""
    theirs = save_gpt_oss(tmp_path) if in_blocks else unquantized(tmp_path)
    if not in_blocks:
        for parameter in theirs.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data if parameter.dim() == 1 else 0)
        theirs.save_pretrained(tmp_path)
    build = Build(torch.float32, TritonBackend(), TRITON)
    ours = find_checkpoint(EngineArgs(str(tmp_path))).load(build, torch.device("cpu"), max_model_len=256)
    assert isinstance(ours, Decoder)
    assert_run_is(PagedRun(ours, [[5, 17, 99, 3, 64, 2, 31], [8]], new_tokens=3), reference_of(theirs))


#: Types of a GGUF file's tensors, by a part of the name; those of the second line are dequantized on GPUs.
TYPES = {
    "token_embd": "Q6_K", "output.weight": "Q4_0", "0.attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q6_K",
    "1.attn_q": "IQ4_NL", "1.ffn_gate_exps": "Q8_0", "1.ffn_up_exps": "Q5_1", "1.ffn_down_exps": "Q8_0",
    "attn_output": "Q5_K", "ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q4_K", "ffn_down_exps": "Q5_0",
}  # fmt: skip


def test_gguf_file_in_a_gpus_formats_equals_its_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kind_of(name: str) -> GGMLQuantizationType:
        return GGMLQuantizationType[next((kind for part, kind in TYPES.items() if part in name), "F32")]

    kind, options = GGUF["mixtral"]
    theirs = random_model(kind, {**options, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 128})
    paths = tmp_path / "blocks.gguf", tmp_path / "float32.gguf"
    for path in paths:
        llama_cpp.write(theirs, path, stored=kind_of, dequantized=path == paths[1], quantize=quantized)
    cuda = torch.device("cuda")
    monkeypatch.setattr(decoder_loader, "stored_weights", lambda *args: stored_weights(*args[:-1], cuda))
    caplog.set_level("INFO")
    build = Build(torch.float32, TritonBackend(), TRITON)
    blocks, plain = (find_checkpoint(EngineArgs(str(path))).load(build, torch.device("cpu"), 64) for path in paths)
    assert isinstance(blocks, Decoder) and isinstance(plain, Decoder)
    assert "GPUs do not keep in blocks: 1 of type IQ4_NL, 1 of type Q5_1, 2 of type Q8_0" in caplog.text
    targets = blocks.weight_targets()
    kept = {name for name, target in targets.items() if target.stored is not None}
    assert kept == {
        *("embed.weight", "lm_head.weight", "layers.0.q.weight"),
        *(f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in ("k", "v", "o")),
        *(f"layers.0.experts.{expert}.{part}.weight" for expert in range(4) for part in ("gate", "up", "down")),
    }
    formats = find_checkpoint(EngineArgs(str(paths[0]))).weight_formats(torch.float32, cuda)
    held = sum(target.tensor.nbytes for target in targets.values())
    assert held == weight_bytes(blocks.config, 4, formats=formats)
    matrices = [module for module in blocks.modules() if isinstance(module, BlockMatrix)]
    assert matrices and all(matrix.is_packed for matrix in matrices)
    ran = [PagedRun(model, [[5, 17, 99], [8]], new_tokens=1, compares_subsets=False) for model in (blocks, plain)]
    found, expected = (torch.stack([*run.sequences[0].logits, *run.sequences[1].logits]) for run in ran)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "kv_cache_dtype", ["auto", pytest.param("fp8_per_token_head", marks=pytest.mark.slow(drawn=False))]
)
def test_engine_output_equals_that_with_sdpa(kv_cache_dtype: str, tiny_llama: Path) -> None:
    """The flag selects the backend; prompts are chunked and share a prefix."""
    texts = []
    for backend in ("triton", "sdpa"):
        llm = LLM(
            str(tiny_llama), device="cpu", attention_backend=backend, kv_cache_dtype=kv_cache_dtype,
            num_gpu_blocks_override=80, max_model_len=160, max_num_batched_tokens=24,
        )  # fmt: skip
        prompt_list = [*prompts(2), [*prompts(2)[0][:20], 7]]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompt_list, params, use_tqdm=False)])
    assert texts[0] == texts[1]
