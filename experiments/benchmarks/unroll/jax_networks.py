"""The networks in JAX, made from torch's modules: the same numbers from the same parameters.

Images are channels last, and kernels (height, width, inputs, outputs), as JAX's own layers have them.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp
from torch import Tensor, nn

from experiments.language.transformer import Attention, Block, Transformer

Params = Mapping[str, Array]


def array(x: Tensor) -> Array:
    """Return a tensor as an array in JAX's usual precision, float32 or int32."""
    return jnp.asarray(x.float().numpy() if x.is_floating_point() else x.int().numpy())


def params_of(model: nn.Module) -> dict[str, Array]:
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return {name: array(p.permute(2, 3, 1, 0) if p.ndim == 4 else p) for name, p in tensors.items()}


def network(module: nn.Module, params: Params, x: Array, name: str = "") -> Array:
    """Return what a module in training mode computes, given all parameters by their names in the whole model.

    Statistics that batch norm gathers on the way are left out: no gradient depends on them.
    """

    def part(child: str) -> Any:
        return lambda x: network(module.get_submodule(child), params, x, f"{name}{child}.")

    match module:
        case nn.Sequential():
            for child, _ in module.named_children():
                x = part(child)(x)
            return x
        case Transformer():
            x = part("tokens")(x) + part("positions")(jnp.arange(x.shape[1]))
            x = part("head")(part("norm")(part("blocks")(x)))
            return x.reshape(-1, x.shape[-1])
        case Block():
            x = x + part("attention")(part("norm1")(x))
            return x + part("mlp")(part("norm2")(x))
        case Attention():
            parts = part("inner")(x).reshape(*x.shape[:2], 3, module.heads, -1)
            query, key, value = jnp.moveaxis(parts, 2, 0)  # (batch, length, heads, width / heads) each
            y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
            return part("outer")(y.reshape(x.shape))
        case _:
            return _layer(module, {k: params[name + k] for k, _ in module.named_parameters()}, x)


def _layer(layer: nn.Module, own: Params, x: Array) -> Array:
    match layer:
        case nn.Linear():
            return x @ own["weight"].T + own.get("bias", 0.0)
        case nn.Conv2d():
            pads = [
                (n // 2, n // 2) for n in layer.kernel_size
            ]  # each layer here keeps the size, or halves it
            order = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(x, own["weight"], layer.stride, pads, dimension_numbers=order)
        case nn.BatchNorm2d():
            return _normalized(x, (0, 1, 2), layer.eps) * own["weight"] + own["bias"]
        case nn.LayerNorm():
            return _normalized(x, (-1,), layer.eps) * own["weight"] + own["bias"]
        case nn.Embedding():
            return own["weight"][x]
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.GELU():
            return jax.nn.gelu(x, approximate=False)
        case nn.AdaptiveAvgPool2d():
            return x.mean((1, 2), keepdims=True)
        case nn.Flatten():
            return x.reshape(len(x), -1)
        case _:
            raise TypeError(f"No layer in JAX stands for {layer}. Add a case to jax_networks.py.")


def _normalized(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)
