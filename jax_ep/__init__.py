"""Expert parallelism for JAX: MoE dispatch and combine inside jit and shard_map."""

from jax_ep._native import build_info as build_info
from jax_ep._version import __version__ as __version__
from jax_ep.experts import ExpertParams as ExpertParams
from jax_ep.experts import SharedParams as SharedParams
from jax_ep.group import Group as Group
from jax_ep.group import create_group as create_group
from jax_ep.layout import Handle as Handle
from jax_ep.moe import MoEConfig as MoEConfig
from jax_ep.moe import MoEParams as MoEParams
from jax_ep.moe import MoEStats as MoEStats
from jax_ep.ops import Rows as Rows
from jax_ep.ops import combine as combine
from jax_ep.ops import dispatch as dispatch
from jax_ep.ops import layout as layout
from jax_ep.quantize import dequantize as dequantize
from jax_ep.quantize import quantize as quantize
from jax_ep.router import Routing as Routing
from jax_ep.router import expert_load as expert_load
from jax_ep.router import load_balance_loss as load_balance_loss
from jax_ep.router import route as route
from jax_ep.router import sequence_balance_loss as sequence_balance_loss
from jax_ep.router import update_bias as update_bias
from jax_ep.router import z_loss as z_loss
from jax_ep.sharding import MoESharding as MoESharding
