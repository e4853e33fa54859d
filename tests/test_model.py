"""model.py against closed forms, another implementation of the same network, and PyTorch's own FLOP counter."""
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig, UserError

TINY = GPTConfig(vocab_size=97, n_layer=2, n_head=2, d_model=32, seq_len=16)


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**vars(TINY), **changes}))


def tokens(B=3, T=16, vocab=97, seed=1):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d_model, n_layer, n_head, millions", [
    (64, 2, 2, "0.62"), (96, 3, 3, "1.12"), (128, 4, 4, "1.80"), (192, 4, 6, "3.34"), (512, 8, 8, "29.11")])
def test_parameter_counts(d_model, n_layer, n_head, millions):
    with torch.device("meta"):
        model = GPT(GPTConfig(d_model=d_model, n_layer=n_layer, n_head=n_head))
    assert f"{model.num_params() / 1e6:.2f}" == millions


def test_the_default_is_the_chapters_model():
    assert GPT(GPTConfig()).num_params() == 1_803_392


def reference_logits(model, idx):
    """The network once more, written from its description: complex rotation, explicit softmax, one head at a time."""
    c, w = model.config, dict(model.named_parameters())

    def norm(x, gain):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain

    half = c.head_dim // 2
    angle = torch.tensor([[t * c.rope_base ** (-2 * i / c.head_dim) for i in range(half)] for t in range(idx.shape[1])],
                         dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rope(x):
        z = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((z.real, z.imag), -1)

    x = w["embedding.weight"][idx]
    future = torch.ones(idx.shape[1], idx.shape[1]).triu(1).bool()
    for i in range(c.n_layer):
        def p(name):
            return w[f"blocks.{i}.{name}.weight"]
        q, k, v = (norm(x, p("attn_norm")) @ p("attn.qkv").T).split(c.d_model, -1)
        heads = []
        for h in range(c.n_head):
            part = slice(h * c.head_dim, (h + 1) * c.head_dim)
            scores = rope(q[..., part]) @ rope(k[..., part]).transpose(1, 2) / math.sqrt(c.head_dim)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., part])
        x = x + torch.cat(heads, -1) @ p("attn.proj").T
        gate, up = (norm(x, p("mlp_norm")) @ p("mlp.gate_up").T).split(c.mlp_hidden, -1)
        x = x + (gate * gate.sigmoid() * up) @ p("mlp.down").T
    return norm(x, w["norm.weight"]) @ w["embedding.weight"].T


@pytest.mark.parametrize("T", [1, 5, 16])
def test_forward_is_the_network_described(T):
    model = tiny().double()
    torch.nn.init.normal_(model.norm.weight)                # gains other than 1
    torch.testing.assert_close(model(tokens(T=T)), reference_logits(model, tokens(T=T)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("d_model, hidden", [(8, 32), (64, 160), (96, 256), (128, 320), (192, 512), (512, 1344)])
def test_mlp_hidden_is_eight_thirds_rounded_down_to_32s(d_model, hidden):
    assert GPTConfig(d_model=d_model, n_head=2).mlp_hidden == hidden


def test_no_position_sees_its_future():
    model, idx = tiny(), tokens()
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 97
    before, after = model(idx), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_loss_is_mean_cross_entropy_in_fp32():
    model, idx = tiny(), tokens()
    targets = idx.roll(-1, 1)
    logits, loss = model(idx, targets)
    assert torch.equal(logits, model(idx)) and loss.dtype == torch.float32
    by_hand = -logits.double().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert loss.item() == pytest.approx(math.log(97), rel=0.02)     # nothing learned yet
    targets[:, 3:] = -100
    assert model(idx, targets)[1].item() == pytest.approx(model(idx[:, :3], targets[:, :3])[1].item(), rel=1e-6)


def test_initialisation():
    model = GPT(GPTConfig())
    for name, p in model.named_parameters():
        if p.dim() < 2:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
        assert p.std().item() == pytest.approx(0.02 / math.sqrt(8) if residual else 0.02, rel=0.03), name
    assert model.head.weight is model.embedding.weight


def test_the_order_of_random_draws():
    """Default initialisations as built, then every weight (the tied one twice), then the residual projections."""
    def draws(model):
        for block in model.blocks:
            yield from (block.attn.qkv, block.attn.proj, block.mlp.gate_up, block.mlp.down)

    model = tiny(seed=5)
    torch.manual_seed(5)
    torch.nn.init.normal_(torch.empty(97, 32))                      # nn.Embedding's own
    for module in draws(model):
        torch.nn.Linear(module.in_features, module.out_features, bias=False)
    torch.nn.Linear(32, 97, bias=False)
    expected = {}
    torch.nn.init.normal_(torch.empty(97, 32), std=0.02)            # the embedding, drawn again when the output matrix is
    for i, module in enumerate(draws(model)):
        expected[i] = torch.nn.init.normal_(torch.empty_like(module.weight), std=0.02)
    tied = torch.nn.init.normal_(torch.empty(97, 32), std=0.02)
    for i, module in enumerate(draws(model)):
        if i % 4 in (1, 3):
            expected[i] = torch.nn.init.normal_(torch.empty_like(module.weight), std=0.02 / 2)
    assert torch.equal(model.embedding.weight, tied)
    for i, module in enumerate(draws(model)):
        assert torch.equal(module.weight, expected[i]), i


@pytest.mark.parametrize("config, T", [(GPTConfig(), 128), (GPTConfig(), 64), (GPTConfig(d_model=192, n_head=6, n_layer=3), 128)])
def test_flops_are_pytorchs_count(config, T):
    """On the meta device, for on a CPU the counter takes attention for nothing. Gains are not matrix products."""
    with torch.device("meta"):
        model, idx = GPT(config), torch.zeros(2, T, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(idx, idx)[1].backward()
    gains = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    assert counter.get_total_flops() == 2 * T * (model.flops_per_token(T) - 6 * gains)
    assert gains < 0.001 * model.num_params()


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    model = tiny()
    matrices, gains = model.adamw(1e-3).param_groups
    assert (matrices["weight_decay"], gains["weight_decay"]) == (0.1, 0.0)
    assert sorted(map(id, matrices["params"] + gains["params"])) == sorted(map(id, model.parameters()))
    assert {p.dim() for p in matrices["params"]} == {2} and {p.dim() for p in gains["params"]} == {1}


def test_generation():
    model, prompt = tiny(), tokens(B=2, T=3)

    def sample(**options):
        return model.generate(prompt, 30, generator=torch.Generator().manual_seed(0), **options)

    out = sample()
    assert out.shape == (2, 33) and torch.equal(out[:, :3], prompt) and 0 <= out.min() and out.max() < 97
    assert torch.equal(out, sample()) and model.training
    greedy = sample(temperature=0)
    assert torch.equal(greedy, sample(top_k=1))
    context = greedy[:, -17:-1]                                     # longer than the context by then: the last 16 decide
    assert torch.equal(greedy[:, -1], model(context)[:, -1].argmax(-1))
    assert torch.equal(out, sample(top_k=10_000))                   # more than there are
    assert torch.equal(greedy, sample(temperature=1e-30))           # so cold that nothing may overflow


def test_top_k_never_leaves_the_k_likeliest():
    model, prompt = tiny(), tokens(B=1, T=4)
    likeliest = set(model(prompt)[0, -1].topk(3).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    seen = {model.generate(prompt, 1, top_k=3, generator=generator)[0, -1].item() for _ in range(60)}
    assert seen == likeliest


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": 0}])
def test_generation_refuses(options):
    with pytest.raises(UserError):
        tiny().generate(tokens(), 1, **options)
    with pytest.raises(UserError):
        tiny().generate(torch.empty(1, 0, dtype=torch.long), 1)


@pytest.mark.parametrize("changes, words", [
    ({"n_head": 3}, "does not divide"), ({"d_model": 0}, "d_model"), ({"n_layer": -1}, "n_layer"), ({"vocab_size": 0}, "vocab_size"),
    ({"seq_len": 0}, "seq_len"), ({"d_model": 6, "n_head": 2}, "even")])
def test_sizes_that_do_not_fit(changes, words):
    with pytest.raises(UserError, match=words):
        GPTConfig(**changes)


def test_a_sequence_longer_than_the_context():
    with pytest.raises(UserError, match="17.*16"):
        tiny()(tokens(T=17))
