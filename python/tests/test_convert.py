"""winnow.hf.convert(): transformers' models on winnow's layers.

The models are random and small, with the real head sizes; prompts are longer than window and top-k,
rows are padded on the left. A sequence that generate() gave is checked by one pass of the oracle
over all of it, which has no caches and no padding: where the oracle's best token is the generated
one at every step, its greedy tokens are the same.
"""

import copy
import functools
import importlib.util
import pathlib
import re

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")

import transformers

import layer_oracle
import winnow.hf
from conftest import devices_of
from layer_models import FAMILIES, LENGTHS, model_of, prompt, tokens

if not all(hasattr(transformers, f"{family}ForCausalLM") for family in FAMILIES):
    pytest.skip("this transformers lacks one of the families", allow_module_level=True)

NEW = 4
# The prompts of seeds 0 to 5: the first ones whose best tokens all lead by four times what another
# order of sums moves a logit, so that tokens are equal because attention is right.
PROMPTS = {
    "DeepseekV32": (0, 1, 5, 12, 1, 1),
    "GlmMoeDsa": (0, 0, 7, 1, 0, 0),
    "DeepseekV4": (0, 7, 0, 0, 0, 4),
}
# Where transformers' eager attention has another token, its best two logits lie within this share
# of the logits' standard deviation (docs/layers.md).
EAGER_GAP = 1.0
# Where two ways to compute the same have different tokens, from a prompt that was not chosen: the
# same share. GEMMs of other sizes and machines sum in another order, and 0.07 was seen.
TIE_GAP = 0.1


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are small: more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def converted(family, cache, seed=0):
    return winnow.hf.convert(model_of(family, seed), cache)


def generate(model, inputs, new=NEW, **options):
    options = {"do_sample": False, **options}
    return model.generate(
        **inputs,
        max_new_tokens=new,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )


def logits_alone(model, out, inputs):
    """[rows, new tokens, vocabulary]: of the model on each row's sequence alone."""
    rows = []
    for sequence, mask in zip(out.sequences, inputs["attention_mask"], strict=True):
        ids = sequence[int(mask.argmax()) :][None]
        with torch.no_grad():
            rows.append(model(ids, use_cache=False).logits[0, -NEW - 1 : -1].float())
    return torch.stack(rows)


def gap(logits):
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def expect_same_tokens(new, greedy, rows=slice(None)):
    """New tokens [rows, n] are the first n that generate() chose greedily, up to a tie."""
    scores = torch.stack(greedy.scores, 1).float()[rows]
    differ = new != greedy.sequences[rows, -NEW:][:, : new.shape[1]]
    for row, logits in zip(differ, scores, strict=True):
        if row.any():
            assert gap(logits[int(row.int().argmax())]) <= TIE_GAP * logits.std()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_tokens_of_the_oracle(family, seed):
    """bf16 caches: the tokens of the oracle; where eager has others, its best two are close."""
    model, inputs = model_of(family, seed), prompt(PROMPTS[family][seed], LENGTHS[family])
    out = generate(winnow.hf.convert(copy.deepcopy(model), "bf16"), inputs)
    best, ours = out.sequences[:, -NEW:], torch.stack(out.scores, 1).float()
    eager = logits_alone(model, out, inputs)
    oracle = logits_alone(layer_oracle.replace(model), out, inputs)
    # Another order of sums moves logits by a hundredth of their spread or less, in the mean.
    assert (oracle - ours).abs().mean() < 0.03 * oracle.std()
    assert torch.equal(oracle.argmax(-1), best)
    other = eager.argmax(-1) != best
    shares = gap(eager)[other] / eager.std()
    print(f"\n{family} {seed}: eager has {len(shares)} other tokens, gaps {shares.tolist()}")
    assert (shares <= EAGER_GAP).all()


@pytest.mark.parametrize("device", devices_of("compress")[1:])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(6))
def test_on_a_device(family, seed, device):
    """On CUDA: the oracle's tokens, up to ties of a model whose GEMMs sum in another order; then a
    second turn on the same cache, with fp8 caches too."""
    model, inputs = model_of(family, seed), prompt(PROMPTS[family][seed], LENGTHS[family])
    there = {name: x.to(device) for name, x in inputs.items()}
    ours = winnow.hf.convert(copy.deepcopy(model).to(device), "bf16")
    fp8 = winnow.hf.convert(copy.deepcopy(model).to(device), "fp8")
    oracle = layer_oracle.replace(model)
    for converted_model, moved in ((ours, 0.05), (fp8, 0.2)):
        cache = winnow.hf.new_cache(converted_model)
        turn, host = there, inputs
        for more in (23, 0):
            out = generate(converted_model, turn, past_key_values=cache)
            scores = torch.stack(out.scores, 1).float().cpu()
            out.sequences = out.sequences.cpu()
            want = logits_alone(oracle, out, host)
            assert (want - scores).abs().mean() < moved * want.std()
            differ = want.argmax(-1) != out.sequences[:, -NEW:]
            if converted_model is ours:
                assert (gap(want)[differ] <= TIE_GAP * want.std()).all()
            said = tokens(seed, out.sequences.shape[0], more)
            mask = torch.ones(out.sequences.shape[0], NEW + more, dtype=torch.long)
            host = {
                "input_ids": torch.cat([out.sequences, said], 1),
                "attention_mask": torch.cat([host["attention_mask"], mask], 1),
            }
            turn = {name: x.to(device) for name, x in host.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_caches(family):
    """What fp8 caches change in log probabilities, beside bf16 caches on the same tokens."""
    inputs = prompt(1, LENGTHS[family])
    out = generate(converted(family, "bf16"), inputs)
    exact = logits_alone(converted(family, "bf16"), out, inputs).log_softmax(-1)
    moved = (logits_alone(converted(family, "fp8"), out, inputs).log_softmax(-1) - exact).abs()
    print(
        f"\n{family}: fp8 moves log probabilities by {moved.mean():.4f}, at most {moved.max():.3f}"
    )
    assert 0 < moved.mean() < 0.03 and moved.max() < 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_are_rows_alone(family):
    model, inputs = converted(family, "fp8"), prompt(2, LENGTHS[family])
    together = generate(model, inputs)
    scores = torch.stack(together.scores, 1).float()
    for row, length in enumerate(LENGTHS[family]):
        ids = inputs["input_ids"][row, -length:][None]
        alone = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        expect_same_tokens(alone.sequences[:, -NEW:], together, [row])
        moved = (alone.scores[0][0].float() - scores[row, 0]).abs().max()
        assert moved < 0.2 * scores[row].std()


@pytest.mark.parametrize("family", FAMILIES)
def test_turns(family):
    """Three turns on one cache give what one pass over the whole conversation gives."""
    model = converted(family, "bf16")
    inputs = prompt(3, (120, 61))
    cache = winnow.hf.new_cache(model)
    for turn, more in enumerate((40, 90, 0)):
        out = generate(model, inputs, past_key_values=cache)
        assert out.past_key_values is cache
        # All tokens but the last, whose key nobody has requested yet.
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        want = logits_alone(model, out, inputs)
        differ = want.argmax(-1) != out.sequences[:, -NEW:]
        assert (gap(want)[differ] <= TIE_GAP * want.std()).all()
        said = tokens(turn, 2, more)
        mask = torch.ones(2, NEW + more, dtype=torch.long)
        inputs = {
            "input_ids": torch.cat([out.sequences, said], 1),
            "attention_mask": torch.cat([inputs["attention_mask"], mask], 1),
        }
    cache.reset()
    assert cache.used_bytes() == 0 and cache.get_seq_length() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_ways_to_generate(family):
    """Sampling, several sequences of a prompt, chunked prefill, no cache."""
    model, inputs = converted(family, "fp8"), prompt(4, (140, 90))
    greedy = generate(model, inputs)
    chunked = generate(model, inputs, prefill_chunk_size=48)
    expect_same_tokens(chunked.sequences[:, -NEW:], greedy)
    # A chunk in which the row has no token.
    padded = prompt(4, (140, 90))
    padded = {name: x[1:] for name, x in padded.items()}
    chunked = generate(model, padded, prefill_chunk_size=48)
    expect_same_tokens(chunked.sequences[:, -NEW:], greedy, [1])
    bare = generate(model, inputs, new=2, use_cache=False)
    expect_same_tokens(bare.sequences[:, -2:], greedy)
    assert bare.past_key_values is None
    options = {"do_sample": True, "num_return_sequences": 2, "top_k": 8}
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(generate(model, inputs, **options).sequences)
    assert drawn[0].shape == (4, 140 + NEW)
    assert torch.equal(drawn[0], drawn[1])
    assert len({tuple(row.tolist()) for row in drawn[0]}) == 4


def test_cropping():
    """MLA keeps its whole past: assisted decoding takes tokens back. V4 does as far as it can."""
    model, inputs = converted("DeepseekV32", "fp8"), prompt(5, (150,))
    greedy = generate(model, inputs)
    assisted = generate(model, inputs, prompt_lookup_num_tokens=3)
    expect_same_tokens(assisted.sequences[:, -NEW:], greedy)
    cache = winnow.hf.new_cache(model)
    ids = inputs["input_ids"]
    with torch.no_grad():
        want = model(ids, past_key_values=cache).logits[:, -20:]
        cache.crop(-20)
        assert cache.get_seq_length() == 130
        got = model(ids[:, -20:], past_key_values=cache).logits
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8
    with pytest.raises(ValueError, match="crop: expected 0 or a negative number"):
        cache.crop(20)
    model = converted("DeepseekV4", "fp8")
    cache = winnow.hf.new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 150
    with pytest.raises(NotImplementedError, match="winnow.hf: crop: .* of request 0 begins at"):
        cache.crop(-100)
    assert cache.get_seq_length() == 150
    with pytest.raises(ValueError, match="stateful|assisted"):
        generate(model, inputs, prompt_lookup_num_tokens=3)


def example():
    path = pathlib.Path(__file__).parents[2] / "examples" / "convert.py"
    spec = importlib.util.spec_from_file_location("convert_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example(capsys):
    example().main(["--family", "glm", "--tokens", "256"])
    said = capsys.readouterr().out
    assert "transformers: 2816 B a token, all layers, and 0 B a row" in said
    assert "winnow fp8: 1576 B a token, all layers, and 0 B a row" in said
    assert len(re.findall(r"(?m)^.*: [0-9.]+ s for 512 tokens, then [0-9.]+ ms a step$", said)) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token(family):
    """The bytes that docs/layers.md names, measured."""
    model = model_of(family, 0)
    theirs = bytes_by_length(model, example().bytes_of)
    used = {}
    for cache in ("bf16", "fp8"):
        ours = winnow.hf.convert(copy.deepcopy(model), cache)
        used[cache] = bytes_by_length(ours, lambda c: c.used_bytes())
    print(f"\n{family}: bytes of {1024} and {2048} tokens {theirs}, {used}")
    if family != "DeepseekV4":
        layers, indexers = model.config.num_hidden_layers, 2  # GLM's shared layer has none
        assert (
            used["bf16"] == theirs == [n * (layers * 1152 + indexers * 256) for n in (1024, 2048)]
        )
        assert used["fp8"] == [n * (layers * 656 + indexers * 132) for n in (1024, 2048)]
        return
    # C4A's 256 entries and index keys more; C128A's eight stand in the page that there was.
    for cache, formats in (
        ("bf16", ("v4_bf16", "index_keys_bf16")),
        ("fp8", ("v4_fp8", "index_keys")),
    ):
        page = sum(winnow.cache_shape(f, 1, 64)[1] for f in formats)
        assert used[cache][1] - used[cache][0] == 4 * page
    assert theirs[1] - theirs[0] == 1024 * (1024 + 256) // 4 + 8 * 1024


@torch.no_grad()
def bytes_by_length(model, count):
    """What a cache of 1024 tokens holds, and what one of 2048."""
    cache, found = None, []
    for chunk in tokens(0, 2, 1024):
        cache = model(chunk[None], past_key_values=cache, use_cache=True).past_key_values
        found.append(count(cache))
    return found


def test_what_is_not_served():
    model, ids = converted("DeepseekV32", "fp8"), tokens(0, 2, 12)
    for options, words in (
        ({"num_beams": 2}, "beam search"),
        ({"cache_implementation": "static"}, "cache_implementation: expected None, found 'static'"),
        ({"output_attentions": True}, "output_attentions"),
    ):
        with pytest.raises(NotImplementedError, match=f"winnow.hf: {words}"):
            generate(model, {"input_ids": ids}, **options)
    with pytest.raises(NotImplementedError, match="winnow.hf: inference only"):
        model(ids)
    with torch.no_grad():
        model.train()
        with pytest.raises(NotImplementedError, match="winnow.hf: training is not served"):
            model(ids)
        model.eval()
        with pytest.raises(TypeError, match="expected a cache of winnow.hf.new_cache"):
            model(ids, past_key_values=transformers.DynamicCache())
        with pytest.raises(NotImplementedError, match="attention_mask: expected .rows, columns"):
            model(ids, attention_mask=torch.ones(2, 1, 12, 12))
        with pytest.raises(NotImplementedError, match="packed sequences are not served"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]]))
        with pytest.raises(
            NotImplementedError, match="cu_seq_lens_q: packed sequences are not serv"
        ):
            model(ids, cu_seq_lens_q=torch.tensor([0, 5, 12]).int())
        with pytest.raises(
            ValueError, match=r"input_ids: expected \[rows, columns\], found \[12\]"
        ):
            model(ids[0])
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model()
        with pytest.raises(ValueError, match=r"position_ids: expected \[2, 12\], found \[2, 11\]"):
            model(ids, position_ids=torch.arange(11).expand(2, -1))
        cache = winnow.hf.new_cache(model)
        model(ids, past_key_values=cache)
        for at in (11, 13):
            with pytest.raises(NotImplementedError, match="and those of the past, in every row"):
                model(ids[:, :1], past_key_values=cache, position_ids=torch.full((2, 1), at))
        masked = torch.ones(2, 13).long()
        masked[0, 3] = 0
        for inputs, error, words in (
            ({"attention_mask": masked}, NotImplementedError, "cannot be masked later"),
            ({"attention_mask": torch.ones(2, 9)}, ValueError, r"expected \[2, 13\], found"),
        ):
            with pytest.raises(error, match=words):
                model(ids[:, :1], past_key_values=cache, **inputs)
        with pytest.raises(
            ValueError, match="expected the whole conversation, more than the 12 col"
        ):
            model.generate(ids[:, :5], past_key_values=cache, max_new_tokens=2)
        with pytest.raises(
            NotImplementedError, match="repeats the 12 columns that the cache holds"
        ):
            model.generate(ids[:, :7], past_key_values=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="it holds 2 rows, the batch has 1"):
            model(ids[:1, :1], past_key_values=cache)
        # Nothing of that has touched the cache.
        assert cache.get_seq_length() == 12
        model(ids[:, :1], past_key_values=cache)
        for mask in (torch.full((2, 12), -1e9), torch.full((2, 12), 2)):
            with pytest.raises(
                ValueError, match="attention_mask: expected 1 for a token and 0 for"
            ):
                model(ids, attention_mask=mask)
        with pytest.raises(NotImplementedError, match="attention_mask: .* found dict"):
            model(ids, attention_mask={"indexed_attention": None})
    with pytest.raises(NotImplementedError, match="save the model before convert"):
        model.save_pretrained("nowhere")
    for call in (cache.batch_repeat_interleave, cache.batch_select_indices, cache.reorder_cache):
        with pytest.raises(NotImplementedError, match="converted models do not serve it"):
            call(2)


def test_what_cannot_be_converted():
    model = converted("DeepseekV32", "fp8")
    with pytest.raises(ValueError, match="it has been converted before"):
        winnow.hf.convert(model)
    with pytest.raises(NotImplementedError, match="expected one of deepseek_v32, .* found Linear"):
        winnow.hf.convert(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="expected one that convert"):
        winnow.hf.new_cache(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="cache: expected fp8 or bf16, found 'fp4'"):
        winnow.hf.convert(model, "fp4")
    for family, options, words in (
        ("DeepseekV32", {"kv_lora_rank": 32}, "expected kv_lora_rank 512.*found 32, 64 and 128"),
        ("DeepseekV4", {"index_head_dim": 64}, "found 512, 64 and 64"),
        ("DeepseekV4", {"compress_rate_hca": 8}, "heavily_compressed_attention. 128, found 8"),
    ):
        model = model_of(family, 0, **options)
        before = dict(model.named_modules())
        with pytest.raises(NotImplementedError, match=words):
            winnow.hf.convert(model)
        assert dict(model.named_modules()) == before
    with pytest.raises(ValueError, match="page: expected 1 to .*, found 0"):
        winnow.hf.convert(model_of("DeepseekV32", 0), page=0)
    for page in ("64", 64.0):
        with pytest.raises(TypeError, match="^winnow.hf: page: expected an int, found "):
            winnow.hf.convert(model_of("DeepseekV32", 0), page=page)
    spread = model_of("DeepseekV32", 0)
    spread.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"model: expected one device, found \['cpu', 'meta'\]"):
        winnow.hf.convert(spread)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_after_a_pass_that_failed(family):
    """What raises in the middle of a first pass leaves a cache that is as good as new."""
    model, ids = converted(family, "bf16"), tokens(0, 2, 40)
    cache = winnow.hf.new_cache(model)

    def fail(*_):
        raise RuntimeError("in the middle")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(ids, past_key_values=cache)
    hook.remove()
    for columns in (slice(0, 9), slice(9, 10), slice(10, 40)):
        got = model(ids[:1, columns], past_key_values=cache).logits
    want = model(ids[:1]).logits[:, 10:]
    assert (got - want).abs().max() < 0.2 * want.std()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_after_a_later_pass_that_failed(family):
    """The same pass again gives what it gives where none has failed, at whichever layer it did."""
    model, ids = converted(family, "bf16"), tokens(0, 2, 190)
    cache = winnow.hf.new_cache(model)
    model(ids[:, :150], past_key_values=cache)
    twin = copy.deepcopy(cache)

    def fail(*_):
        raise RuntimeError("in the middle")

    for layer in model.model.layers:
        hook = layer.mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(ids.flip(1)[:, :40], past_key_values=cache)
        hook.remove()
    got, want = (model(ids[:, 150:], past_key_values=c).logits for c in (cache, twin))
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_copies_and_dtypes(family):
    """A deep copy of a prompt's cache serves as well; .to(dtype) leaves the layers as they are."""
    model, ids = converted(family, "fp8"), tokens(0, 2, 40)
    prompt_cache = winnow.hf.new_cache(model)
    model(ids[:, :30], past_key_values=prompt_cache)
    caches = [copy.deepcopy(prompt_cache), prompt_cache]
    got = [model(ids[:, 30:], past_key_values=cache).logits for cache in caches]
    assert torch.equal(*got)
    layer = model.model.layers[1].self_attn
    before = {name: weight.clone() for name, weight in layer.named_buffers()}
    model.bfloat16()
    for name, weight in layer.named_buffers():
        assert weight.dtype == before[name].dtype and torch.equal(weight, before[name])
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_defaults_of_the_process(family):
    """Autocast, the default dtype and the default device are not the layers' affair."""
    ids = tokens(0, 1, 150)
    want = converted(family, "bf16")(ids).logits
    layers = converted(family, "bf16").model.winnow.layers
    given = [torch.randn(150, 64, dtype=torch.bfloat16) for _ in layers]

    def run():
        caches = winnow.torch.LayerCaches(layers, dtype="bf16")
        step = caches.begin([(caches.add(), 150)])
        return [layer(x, step) for layer, x in zip(layers, given, strict=True)]

    plain = run()
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert all(map(torch.equal, run(), plain))
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert all(map(torch.equal, run(), plain))
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert all(map(torch.equal, run(), plain))
        cache = winnow.hf.new_cache(converted(family, "bf16"))
        begun = cache.begin(2, 5, None, None)
        cache.commit(begun)
        begun = cache.begin(
            2, 1, torch.ones(2, 6, device="cpu"), torch.full((2, 1), 5, device="cpu")
        )
        assert begun.columns.device == cache.mask.device == torch.device("cpu")
    assert torch.equal(converted(family, "bf16")(ids).logits, want)
