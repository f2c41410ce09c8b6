"""The code fragments of the models of `tests.fuzz_steps`.

Each turns `h`, of shape (batch, length, D), into another tensor of this shape. In the lines, `s` is the model and `_i`
stands for the fragment's number. The changes are statements about the model `m`, between two steps.
"""

from __future__ import annotations

from dataclasses import dataclass

D = 4

# The source of a model consists of this, what the fragments need, and their lines.
HEADER = f"""
import copy, math, types, numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

D, G = {D}, {{}}
"""

NEEDED = {
    "Scale": """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, mixes):
        ctx.k, ctx.mixes = k, mixes
        return x * k

    @staticmethod
    def backward(ctx, g):
        return (g.mean(0, keepdim=True).expand_as(g) if ctx.mixes else g) * ctx.k, None, None
""",
    "WRITES": """
WRITES = {
    "copy": lambda t, v: t.copy_(v),
    "data": lambda t, v: t.data.copy_(v),
    "detach": lambda t, v: t.detach().mul_(0.5).add_(v),
    "set data": lambda t, v: setattr(t, "data", v),
    "item": lambda t, v: t.data.__setitem__(0, v[0]),
    "foreach": lambda t, v: torch._foreach_copy_([t.data], [v]),
    "out": lambda t, v: torch.add(v, 1, out=t.data),
    "storage": lambda t, v: t.untyped_storage().copy_(v.clone().untyped_storage()),
    "numpy": lambda t, v: np.copyto(t.detach().numpy(), v.numpy()),
    "view": lambda t, v: t.view(2, 2).copy_(v.view(2, 2)),
    "lerp": lambda t, v: t.data.lerp_(v, 0.1),
}
""",
}


@dataclass(frozen=True)
class Fragment:
    """Lines of `__init__` and of `forward`, and what may change between two steps."""

    forward: tuple[str, ...]
    init: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


def _make(init: str, forward: str, changes: str = "") -> Fragment:
    def split(text: str) -> tuple[str, ...]:
        return tuple(line for line in text.strip().splitlines() if line.strip())

    return Fragment(split(forward), tuple(line.strip() for line in split(init)), tuple(map(str.strip, split(changes))))


def _choose(name: str, *values: str) -> str:
    """Changes that give an attribute one of some values."""
    return "\n".join(f"m.{name}_i = {value}" for value in values)


_HOOKS = """
m.l_i.register_forward_hook(lambda mod, a, out: out * 2)
m.l_i.register_forward_hook(lambda mod, a, out: out - out.mean(0))
m.l_i.register_forward_pre_hook(lambda mod, a: (a[0] + 1,))
m.l_i.register_full_backward_hook(lambda mod, gi, go: (gi[0] * 2,) if gi[0] is not None else None)
m.l_i.register_full_backward_hook(lambda mod, gi, go: (gi[0] - gi[0].mean(0),) if gi[0] is not None else None)
m.l_i._forward_hooks.clear(); m.l_i._forward_pre_hooks.clear()
m.l_i._backward_hooks.clear()
"""

_PARAMETERS = """
m.l_i.requires_grad_(False)
m.l_i.requires_grad_(True)
m.l_i.weight.requires_grad_(False)
m.l_i.weight = nn.Parameter(torch.randn_like(m.l_i.weight))
m.l_i.weight.data = torch.randn_like(m.l_i.weight)
m.l_i.weight.data.mul_(0.5)
m.l_i.bias = None
m.l_i.weight = m.l_0.weight
m.l_0.weight = m.l_i.weight
m.l_i = nn.Linear(D, D, bias=False).to(m.l_0.weight)
m.l_i = m.l_0
m.l_i.weight = nn.Parameter(m.l_0.weight.detach().t())
torch.nn.utils.parametrizations.weight_norm(m.l_i)
m.l_i.forward = types.MethodType(lambda l, x: F.linear(x, l.weight).tanh(), m.l_i)
del m.l_i.forward
"""

_DIMS = ("1", "-1", "2", "0", "(0, 1)", "(1, 2)")

FRAGMENTS: dict[str, Fragment] = {
    "linear": _make("s.l_i = nn.Linear(D, D)", "h = s.l_i(h)", _PARAMETERS + _HOOKS),
    "linear of rows": _make(
        "s.l_i = nn.Linear(D, D)", "h = s.l_i(h.reshape(-1, D)).reshape(h.shape).tanh()", _PARAMETERS + _HOOKS
    ),
    "linear by hand": _make(
        "s.w_i, s.op_i = nn.Parameter(torch.randn(D, D) / 2), 'matmul'",
        "h = getattr(torch, s.op_i)(h, s.w_i)",
        "m.w_i.requires_grad_(False)\nm.w_i.requires_grad_(True)\nm.w_i = nn.Parameter(torch.randn_like(m.w_i))\n"
        "m.w_i = nn.Parameter(m.w_i.data[0])\nm.w_i = nn.Parameter(m.w_i.data.expand(1, D, D).clone())\n"
        + _choose("op", "'mul'", "'add'", "'matmul'", "'sub'", "'where'"),
    ),
    "frozen part": _make(
        "s.l_i, s.on_i = nn.Linear(D, D), True",
        "with torch.set_grad_enabled(s.on_i):\n    z = s.l_i(h)\nh = h + z",
        _choose("on", "False", "True") + _PARAMETERS,
    ),
    "detached": _make(
        "s.l_i, s.cut_i = nn.Linear(D, D), True",
        "h = h + s.l_i(h.detach() if s.cut_i else h)",
        _choose("cut", "False", "True") + _PARAMETERS,
    ),
    "checkpoint": _make(
        "s.l_i, s.re_i = nn.Linear(D, D), False",
        "h = checkpoint(s.l_i, h, use_reentrant=s.re_i)",
        _choose("re", "True", "False") + _PARAMETERS,
    ),
    "autocast": _make(
        "s.l_i, s.on_i = nn.Linear(D, D), False",
        "with torch.autocast('cpu', torch.bfloat16, enabled=s.on_i):\n    z = s.l_i(h)\nh = h + z.to(h.dtype)",
        _choose("on", "False", "True") + _PARAMETERS,
    ),
    "convolution": _make(
        "s.c_i = nn.Conv1d(D, D, 3, padding=1)",
        "h = s.c_i(h.mT).mT",
        "m.c_i = nn.Conv1d(D, D, 3, padding=1, groups=2).to(m.c_i.weight)\nm.c_i.padding_mode = 'zeros'\n"
        "m.c_i = nn.Conv1d(D, D, 1).to(m.c_i.weight)\nm.c_i.requires_grad_(False)\nm.c_i.requires_grad_(True)",
    ),
    "samples as channels": _make(
        "s.g_i, s.w_i = 8, nn.Parameter(torch.ones(3))",
        "g = math.gcd(len(h), s.g_i)\n"
        "h = F.conv1d(h.flatten(1), s.w_i.detach().expand(len(h), len(h) // g, 3), groups=g, padding=1).view(h.shape)",
        _choose("g", "1", "2", "4", "60"),
    ),
    "depthwise by samples": _make(
        "s.w_i, s.g_i = nn.Parameter(torch.ones(1, 1, 3)), 60",
        "g = math.gcd(len(h), s.g_i)\n"
        "h = F.conv1d(h.flatten(1), s.w_i.expand(len(h), len(h) // g, 3), groups=g, padding=1).view(h.shape)",
        _choose("g", "1", "2", "4", "60"),
    ),
    "layer norm": _make(
        "s.n_i = nn.LayerNorm(D)",
        "h = s.n_i(h)",
        "m.n_i.eps = 0.5\nm.n_i.eps = 1e-5\nm.n_i.weight = m.n_i.bias\nm.n_i.requires_grad_(False)\n"
        "m.n_i = nn.RMSNorm(D).to(m.n_i.weight)\n"
        "m.n_i.requires_grad_(True)\nm.n_i.bias.data = m.n_i.weight.data",
    ),
    "group norm": _make(
        "s.n_i = nn.GroupNorm(2, D)",
        "h = s.n_i(h.mT).mT",
        "m.n_i.num_groups = 1\nm.n_i.num_groups = 4\nm.n_i.eps = 1.0\nm.n_i = nn.GroupNorm(1, D).to(m.n_i.weight)",
    ),
    "batch norm": _make(
        "s.n_i = nn.BatchNorm1d(D).eval()",
        "h = s.n_i(h.mT).mT",
        "m.n_i.train()\nm.n_i.eval()\nm.n_i.running_var.mul_(2)\nm.n_i.running_mean = m.n_i.running_var\n"
        "m.n_i.momentum = None\nm.n_i.track_running_stats = False\nm.n_i.running_mean = m.n_i.running_var = None",
    ),
    "instance norm": _make(
        "s.n_i = nn.InstanceNorm1d(D, affine=True, track_running_stats=True).eval()",
        "h = s.n_i(h.mT).mT if h.shape[1] > 1 else h",
        "m.n_i.train()\nm.n_i.eval()\nm.n_i.running_var.mul_(2)",
    ),
    "attention": _make(
        "s.a_i = nn.MultiheadAttention(D, 2, batch_first=True)",
        "h = h + s.a_i(h, h, h, need_weights=False)[0]",
        "m.a_i.batch_first = False\nm.a_i.batch_first = True\nm.a_i.num_heads, m.a_i.head_dim = 1, 4\n"
        "m.a_i.dropout = 0.5\nm.a_i.in_proj_weight.requires_grad_(False)\nm.a_i.in_proj_weight.requires_grad_(True)",
    ),
    "attention by hand": _make(
        "s.causal_i, s.swap_i, s.scale_i = False, False, None",
        "z = h.transpose(0, 1) if s.swap_i else h\n"
        "z = F.scaled_dot_product_attention(z, z, z, is_causal=s.causal_i, scale=s.scale_i)\n"
        "h = h + (z.transpose(0, 1) if s.swap_i else z)",
        _choose("causal", "True", "False") + "\n" + _choose("swap", "True", "False") + "\n" + _choose("scale", "0.1"),
    ),
    "recurrent": _make(
        "s.r_i = nn.GRU(D, D, batch_first=True)",
        "h = s.r_i(h)[0]",
        "m.r_i.batch_first = False\nm.r_i.batch_first = True\nm.r_i.weight_hh_l0.requires_grad_(False)\n"
        "m.r_i.requires_grad_(True)\nm.r_i.dropout = 0.5",
    ),
    "centred": _make(
        "s.dim_i = 1", "h = h - h.mean(s.dim_i, keepdim=True)", _choose("dim", *_DIMS)
    ),
    "by one dimension": _make(
        "s.dim_i, s.f_i = 1, 'cumsum'",
        "h = getattr(h, s.f_i)(s.dim_i)",
        _choose("dim", "1", "-1", "2", "0") + "\n" + _choose("f", "'softmax'", "'cumsum'", "'flip'", "'log_softmax'"),
    ),
    "sorted": _make("s.dim_i = 1", "h = h.sort(s.dim_i).values", _choose("dim", "1", "2", "0", "-1")),
    "normalised": _make("s.dim_i = 1", "h = F.normalize(h, dim=s.dim_i)", _choose("dim", "1", "2", "0", "-1")),
    "rolled": _make(
        "s.dim_i, s.k_i = 1, 1", "h = h + h.roll(s.k_i, s.dim_i)", _choose("dim", "1", "2", "0") + "\nm.k_i = 0"
    ),
    "products": _make(
        "s.eq_i = 'btd,bsd,bse->bte'",
        "h = torch.einsum(s.eq_i, h, h.tanh(), h.sin())",
        _choose("eq", "'btd,bsd,bse->bte'", "'btd,btd,bte->bte'", "'btd,csd,cse->bte'", "'btd,ctd,bte->bte'"),
    ),
    "function": _make(
        "s.f_i = torch.tanh",
        "h = s.f_i(h)",
        _choose("f", "torch.sin", "F.gelu", "F.softplus", "lambda z: z - z.mean(0)", "lambda z: z - z.mean(1, True)")
        + "\nm.f_i = torch.vmap(lambda z: z - z.mean(0))\nm.f_i = torch.vmap(lambda z: z - z.mean(), 1, 1)",
    ),
    "branch": _make(
        "s.flag_i = False",
        "h = h.tanh() if s.flag_i else h.sin()\nif flag:\n    h = h * 2",
        _choose("flag", "True", "False", "1", "None"),
    ),
    "python number": _make(
        "s.k_i = 2.0", "h = h * s.k_i", _choose("k", "3", "0.5", "0", "True", "np.float64(1.5)", "torch.tensor(2.0)")
    ),
    "size as number": _make(
        "s.dim_i = 1", "h = h / h.shape[s.dim_i]", _choose("dim", "0", "1", "2")
    ),
    "cut": _make(
        "s.k_i = 1",
        "h = torch.cat([h[:, :s.k_i], h[:, s.k_i:].tanh()], 1)",
        _choose("k", "0", "2", "-1", "None", "100"),
    ),
    "order": _make(
        "s.dim_i, s.by_i = 1, 1",
        "order = torch.arange(h.shape[s.dim_i]).roll(s.by_i)\n"
        "h = h + (h[:, order] if s.dim_i == 1 else h[order] if s.dim_i == 0 else h[..., order])",
        _choose("dim", "0", "1", "2") + "\n" + _choose("by", "0", "1"),
    ),
    "there and back": _make(
        "s.by_i, s.back_i = 1, 1",
        "h = h.roll(s.by_i, 0).tanh().roll(-s.back_i, 0) if len(h) > 1 else h.tanh()",
        "m.by_i = m.back_i = 0\nm.by_i = m.back_i = 1",
    ),
    "mask": _make(
        "s.n_i, s.dim_i = 1, 1",
        "h = h.masked_fill((torch.arange(h.shape[1]) < s.n_i)[None, :, None], 0.5)",
        _choose("n", "0", "2", "torch.tensor(1)"),
    ),
    "gather": _make(
        "s.dim_i = 1", "h = h + h.gather(s.dim_i, h.argsort(s.dim_i))", _choose("dim", "1", "2", "0")
    ),
    "scatter": _make(
        "s.dim_i = 1",
        "n = torch.zeros(h.shape[s.dim_i], dtype=torch.int64)\nh = h + torch.zeros_like(h).index_add(s.dim_i, n, h)",
        _choose("dim", "1", "2", "0"),
    ),
    "positions": _make(
        "s.e_i = nn.Embedding(8, D)",
        "h = h + s.e_i(torch.arange(h.shape[1]))",
        "m.e_i.weight.requires_grad_(False)\nm.e_i.weight.requires_grad_(True)\nm.e_i.padding_idx = 0\n"
        "m.e_i = nn.Embedding(8, D).to(m.e_i.weight)\nm.e_i.max_norm = 0.5\nm.e_i.scale_grad_by_freq = True",
    ),
    "gate": _make(
        "s.a_i, s.dim_i = nn.Parameter(torch.zeros(())), 1",
        "h = h + s.a_i * h.mean(s.dim_i, keepdim=True)",
        _choose("dim", "1", "0", "2") + "\nm.a_i.data.fill_(0.5)\nm.a_i.data.zero_()\nm.a_i.requires_grad_(False)",
    ),
    "gated layer": _make(
        "s.l_i, s.a_i, s.dim_i = nn.Linear(D, D), nn.Parameter(torch.zeros(D)), 1",
        "h = h + s.a_i * s.l_i(h - h.mean(s.dim_i, keepdim=True))",
        _choose("dim", "1", "0") + "\nm.a_i.data.fill_(0.5)\nm.a_i.data.zero_()\n" + _PARAMETERS,
    ),
    "written buffer": _make(
        "s.register_buffer('b_i', torch.ones(D))\ns.register_buffer('spare_i', torch.ones(D))\n"
        "s.into_i, s.from_i, s.way_i, s.dim_i = 'spare_i', 'b_i', 'data', (0, 1)",
        "with torch.no_grad():\n    WRITES[s.way_i](getattr(s, s.into_i), h.detach().mean((0, 1)))\n"
        "h = h * getattr(s, s.from_i)",
        _choose("into", "'b_i'", "'spare_i'") + "\n" + _choose("from", "'b_i'", "'spare_i'") + "\n"
        + "\n".join(f"m.way_i = {name!r}" for name in ("copy", "data", "detach", "set data", "item", "foreach", "out",
                                                        "storage", "numpy", "view", "lerp"))
        + "\nm.spare_i = m.b_i\nm.spare_i = m.b_i.view(D)\nm.spare_i = m.b_i.detach()\nm.b_i.data = m.spare_i.data\n"
        "m.b_i.set_(m.spare_i)\nm.b_i, m.spare_i = m.spare_i, m.b_i\nm.b_i = m.b_i.clone()\n"
        "m.spare_i = torch.ones_like(m.b_i)",
    ),
    "written parameter": _make(
        "s.p_i, s.q_i = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D), requires_grad=False)\n"
        "s.into_i, s.from_i, s.way_i = 'q_i', 'p_i', 'data'",
        "with torch.no_grad():\n    WRITES[s.way_i](getattr(s, s.into_i), h.detach().mean((0, 1)))\n"
        "h = h * getattr(s, s.from_i)",
        _choose("into", "'p_i'", "'q_i'") + "\n" + _choose("from", "'p_i'", "'q_i'") + "\n"
        + _choose("way", "'copy'", "'data'", "'detach'", "'set data'", "'foreach'", "'storage'", "'numpy'", "'view'")
        + "\nm.q_i.requires_grad_(True)\nm.q_i.data = m.p_i.data\nm.p_i.requires_grad_(False)",
    ),
    "written list": _make(
        "s.kept_i, s.into_i, s.from_i, s.way_i = [torch.ones(D, dtype=torch.float64) for _ in 'ab'], 0, 1, 'copy'",
        "with torch.no_grad():\n    WRITES[s.way_i](s.kept_i[s.into_i], h.detach().double().mean((0, 1)))\n"
        "h = h * s.kept_i[s.from_i].to(h.dtype)",
        "m.into_i = 1\nm.into_i = 0\nm.from_i = 0\nm.from_i = 1\nm.kept_i[0] = m.kept_i[1]\n"
        "m.kept_i[0] = m.kept_i[1].view(D)\n"
        + _choose("way", "'copy'", "'data'", "'detach'", "'set data'", "'out'", "'storage'", "'numpy'"),
    ),
    "own rows in a buffer": _make(
        "s.register_buffer('b_i', torch.zeros(8, 1, D))\ns.data_i, s.shift_i = False, 0",
        "own = s.b_i[:len(h)].data if s.data_i else s.b_i[:len(h)].detach()\n"
        "own.copy_(h.detach()[:, :1].roll(s.shift_i, 0))\nh = h + s.b_i[:len(h)]",
        _choose("data", "True", "False") + "\n" + _choose("shift", "0", "1"),
    ),
    "in place": _make(
        "s.k_i, s.way_i = 2.0, 0",
        "h = [lambda z: z.mul_(s.k_i), lambda z: z.relu_(), lambda z: z.add_(1), lambda z: F.relu(z, inplace=True),"
        " lambda z: z.sub_(z.detach().mean(0))][s.way_i](h + 0)",
        _choose("k", "0.5", "torch.tensor(3.0)") + "\n" + _choose("way", "0", "1", "2", "3", "4"),
    ),
    "parts in place": _make(
        "s.dim_i, s.k_i = 1, 0",
        "z = h.clone()\nz.select(s.dim_i, s.k_i).mul_(2)\nz[..., 1] += h[..., 0]\nh = z",
        _choose("dim", "1", "2") + "\n" + _choose("k", "0", "-1"),
    ),
    "behind a view": _make(
        "s.dim_i = 1",
        "z = 2 * h\nfirst = z[..., :2]\nz.copy_(h.detach().flip(s.dim_i))\nh = h * torch.cat([first, z[..., 2:]], -1)",
        _choose("dim", "1", "2", "0"),
    ),
    "behind an alias": _make(
        "s.dim_i, s.which_i = 1, 0",
        "a, b = h.sin(), h.cos()\n(a, b)[s.which_i].data.copy_(h.detach().mean(s.dim_i, keepdim=True).expand_as(h))\n"
        "h = h + a.detach()",
        _choose("dim", "1", "2", "0") + "\n" + _choose("which", "0", "1"),
    ),
    "order of a view": _make(
        "s.by_i = 0",
        "z = 2 * h.detach()\nfirst = z[..., :2]\nz.copy_(h.detach()[torch.arange(len(h)).roll(s.by_i)])\n"
        "h = h + F.pad(first, (0, 2))",
        _choose("by", "0", "1"),
    ),
    "dropout": _make(
        "s.d_i = nn.Dropout(0.5).eval()",
        "h = s.d_i(h)",
        "m.d_i.train()\nm.d_i.eval()\nm.d_i.p = 0.1\nm.d_i.p = 0.0\nm.d_i.inplace = True",
    ),
    "noise": _make(
        "s.on_i = False",
        "h = h + torch.randn_like(h) if s.on_i else h",
        _choose("on", "True", "False"),
    ),
    "counter": _make(
        "s.n_i = 0\ns.register_buffer('count_i', torch.zeros(()))",
        "s.n_i += 1\ns.count_i += 1\nh = h * (1 + 0.1 * s.n_i) + 0.1 * s.count_i",
        "m.n_i = 0\nm.count_i.zero_()\nm.count_i = torch.ones_like(m.count_i)",
    ),
    "previous batch": _make(
        "s.last_i, s.now_i = torch.zeros(D, dtype=torch.float64), False",
        "now = h.detach().double().mean((0, 1))\nlast, s.last_i = s.last_i, now\n"
        "h = h + (now if s.now_i else last).to(h.dtype)",
        _choose("now", "True", "False"),
    ),
    "cache": _make(
        "s.cache_i, s.at_i = [], -1",
        "s.cache_i.append(h.detach())\ns.cache_i[:] = s.cache_i[-2:]\nh = h + s.cache_i[s.at_i].to(h.dtype)",
        _choose("at", "0", "-1") + "\nm.cache_i.clear()",
    ),
    "numpy": _make(
        "s.axis_i = -1",
        "a = h.detach().numpy()\nh = h + torch.from_numpy(a - a.mean(s.axis_i, keepdims=True))",
        _choose("axis", "0", "1", "2", "-1"),
    ),
    "list of numbers": _make(
        "s.dim_i = 1",
        "h = h + torch.tensor(h.detach().mean(s.dim_i, keepdim=True).tolist(), dtype=h.dtype)",
        _choose("dim", "0", "1", "2"),
    ),
    "item": _make(
        "s.on_i = False", "h = h * float(h.detach().mean()) if s.on_i else h", _choose("on", "True", "False")
    ),
    "global": _make(
        "G['k_i'], G['f_i'] = 2.0, (lambda z: z.mean(1, True))",
        "h = h * G['k_i'] - G['f_i'](h)",
        "G['k_i'] = 3\nG['k_i'] = torch.tensor(0.5)\nG['f_i'] = lambda z: z.mean(0, True)\n"
        "G['f_i'] = lambda z: z.mean(1, True)\nG['f_i'] = lambda z: z.mean(-1, True)",
    ),
    "custom backward": _make(
        "s.k_i, s.mixes_i = 2.0, False",
        "h = Scale.apply(h, s.k_i, s.mixes_i)",
        _choose("k", "3.0") + "\n" + _choose("mixes", "True", "False"),
    ),
    "hook on a gradient": _make(
        "s.hook_i = lambda g: g * 2",
        "h = h * 1\nif h.requires_grad and s.hook_i:\n    h.register_hook(s.hook_i)",
        _choose("hook", "None", "lambda g: g * 3", "lambda g: g - g.mean(0)", "lambda g: g - g.mean(1, True)"),
    ),
    "constant with rows": _make(
        "s.w_i, s.on_i = torch.linspace(0.5, 2, 8, dtype=torch.float64), True",
        "h = h * s.w_i[:h.shape[1]].view(1, -1, 1).to(h.dtype)",
        "m.w_i = m.w_i.flip(0)\nm.w_i = m.w_i.float()\nm.w_i.mul_(2)",
    ),
    "default dtype": _make("", "h = h + torch.ones(D).to(h.dtype) * torch.full((D,), 0.5)"),
    "distances": _make("s.swap_i = False", "z = h.transpose(0, 1) if s.swap_i else h\nz = (z @ z.mT) @ z / 4\n"
                       "h = h + (z.transpose(0, 1) if s.swap_i else z)", _choose("swap", "True", "False")),
    "chunks": _make(
        "s.dim_i = -1", "a, b = h.chunk(2, s.dim_i) if h.shape[s.dim_i] > 1 else (h, h)\n"
        "h = h + (a * b).sum(s.dim_i, keepdim=True) if a.shape == b.shape else h", _choose("dim", "-1", "1", "0")
    ),
}  # fmt: skip

# Changes of any model.
EVERYWHERE = (
    "m.train()",
    "m.eval()",
    "m.float()",
    "m.double()",
    "m.zero_grad()",
    "m.requires_grad_(True)",
    "m.load_state_dict(copy.deepcopy(m.state_dict()))",
    "m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True)",
    "m.l_0.weight.data.add_(0.1)",
    "torch.optim.SGD(m.parameters(), 0.1).step()",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_dtype(torch.float32)",
    "m._apply(torch.clone)",
    "m.register_forward_hook(lambda mod, a, out: out * 2)",
    "m.register_forward_hook(lambda mod, a, out: out - out.mean(0))",
    "m._forward_hooks.clear()",
    "m = copy.deepcopy(m)",
    "m.forward = types.MethodType(lambda s, *a, **k: type(s).forward(s, *a, **k) * 2, m)",
    "m.__dict__.pop('forward', None)",
    "m.extra = 'a string'",
    "m.share_memory()",
)
