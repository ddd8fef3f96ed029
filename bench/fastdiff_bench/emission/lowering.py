"""Graphs of compiled blocks, lowered by Inductor to the code of a GPU, and their counts.

``Emitter.compile`` is a backend of ``torch.compile``: Dynamo, AOTAutograd, the partitioner and Inductor's passes are
the real ones. The joint graph, traced on the device ``meta``, is moved to CUDA; at the end its code is counted instead
of compiled. The compiled function returns tensors on ``meta`` with the sizes and strides that the code would produce,
so a whole network runs forward and backward in seconds.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, fx

from fastdiff_bench.emission import fake_gpu, written
from fastdiff_bench.emission.blocks import Block, Layout, Node, Opaque, Pass, Product
from fastdiff_bench.emission.opaque import blank, launched, of_fastdiff

META, GPU = torch.device("meta"), torch.device("cuda", 0)


class Emitter:
    """Collector of the blocks of one network."""

    def __init__(self, arch: int | None = None) -> None:
        """Begin without blocks; ``arch``: compile the kernels for this compute capability, and count them, too."""
        self.arch = arch
        self.blocks: dict[int, Block] = {}
        """By the number of the graph."""
        self.running = ("", "")
        """Class and name of the block whose forward runs."""
        self.counting = True
        """Whether calls count; not when a step is repeated."""
        self._copied: list[int] = []
        """Bytes of each gradient that was copied for the next backward graph."""

    def arrived(self, gradient: Tensor, *, copied: bool) -> None:
        """Note a gradient that the next backward graph takes."""
        if copied and self.counting:
            self._copied.append(2 * gradient.numel() * gradient.element_size())

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Compile a graph of Dynamo; a backend of ``torch.compile``."""
        from torch._inductor.compile_fx import compile_fx

        # Padding of products is decided by timing them.
        patches = {"joint_custom_pre_pass": _to_gpu, "shape_padding": False}
        return compile_fx(graph, inputs, inner_compile=cast(Any, self._inner), config_patches=patches)

    def _inner(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        inputs = [_moved(value) for value in inputs]
        number, backward = options["graph_id"], options.get("is_backward", False)
        block = self.blocks.setdefault(number, Block(self.running[0]))
        _propagate(graph, inputs)
        outputs = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in _outputs(graph)]
        parameters = set(options.get("static_input_idxs", ()))
        found = lower(graph, inputs, backward=backward, parameters=parameters, arch=self.arch)
        if backward:
            block.backward = found
        else:
            block.forward = found

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()  # the boxed convention: the callee releases them
            if self.counting:
                self._called(block, backward)
            return [blank(output) for output in outputs]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _called(self, block: Block, backward: bool) -> None:
        """Note a call of a block, in the backward pass with the gradients that were copied for it."""
        if not backward:
            block.names.append(self.running[1])
            return
        block.restrided += len(self._copied)
        block.restrided_bytes += sum(self._copied)
        self._copied.clear()


def _propagate(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give each node its value; passes over the joint graph leave nodes without one."""
    from torch._inductor import compile_fx

    passes: Any = compile_fx
    passes.view_to_reshape(graph)
    with torch.no_grad():
        passes.fake_tensor_prop(graph, list(inputs))


def _outputs(graph: fx.GraphModule) -> list[Any]:
    return list(graph.graph.find_nodes(op="output")[0].args[0])


def lower(
    graph: fx.GraphModule, inputs: Sequence[Any], *, backward: bool, parameters: set[int], arch: int | None = None
) -> Pass:  # fmt: skip
    """Let Inductor schedule and write the code of a graph, and count it; ``arch``: its instructions, too."""
    from torch._inductor.compile_fx import (
        _recursive_post_grad_passes,
        _recursive_record_original_output_strides,
    )
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    user_outputs = graph.graph.find_nodes(op="output")[0].meta["user_visible_output_idxs"]
    mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))  # type: ignore[attr-defined]
    _recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        _recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, shape_env=mode.shape_env, is_backward=backward, is_inference=False)
        with V.set_graph_handler(lowering), fake_gpu.present():
            lowering.run(*inputs)
            code, _ = lowering.codegen()
            nodes = [_node(node) for node in lowering.scheduler.nodes]
    opaque = [launched(node, arch) for node in graph.graph.nodes if of_fastdiff(node)]
    found = _counted(graph, code.value, nodes, opaque, backward, parameters, user_outputs)
    if arch is not None:
        found.written = written.counted(code.value, [n for n in nodes if n and n.kind == "triton"], arch)
    return found


def _counted(
    graph: fx.GraphModule, code: str, nodes: list[Node | None], opaque: list[Opaque], backward: bool,
    parameters: set[int], user_outputs: Sequence[int],
) -> Pass:  # fmt: skip
    placeholders = graph.graph.find_nodes(op="placeholder")
    given = {node for place, node in enumerate(placeholders) if backward or place not in parameters}
    outputs = _outputs(graph)
    visible = range(len(outputs)) if backward else user_outputs
    rest = [] if backward else [node for place, node in enumerate(outputs) if place not in set(user_outputs)]
    saved = {node: None for node in rest if isinstance(node, fx.Node) and (node not in placeholders or node in given)}
    return Pass(
        kernels=len(set(re.findall(r"^(\w+) = async_compile\.triton\(", code, re.MULTILINE))),
        nodes=_with_launches([node for node in nodes if node is not None], opaque),
        inputs=[_layout(node) for node in placeholders if node in given and _is_tensor(node)],
        outputs=[_layout(outputs[place]) for place in visible if _is_tensor(outputs[place])],
        saved=[_layout(node) for node in saved if _is_tensor(node)],
        opaque=opaque,
        products=[_product(node) for node in graph.graph.nodes if _is_product(node)],
        code=code,
    )


def _with_launches(nodes: list[Node], opaque: list[Opaque]) -> list[Node]:
    """Replace the bytes of the operands of opaque ops by those of their launches and copies."""
    found: dict[str, list[Opaque]] = {}
    for op in opaque:
        found.setdefault(op.name, []).append(op)
    return [found[node.name].pop().counted() if node.kind == "opaque" else node for node in nodes]


def _moved(value: Any) -> Any:
    """Return a value of a graph that was traced on ``meta`` as on the GPU: devices and blank tensors."""
    if isinstance(value, torch.device):
        return GPU if value == META else value
    if isinstance(value, Tensor) and value.device == META:
        with value.fake_mode:  # type: ignore[attr-defined]
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=GPU)
    return value


def _to_gpu(graph: fx.Graph) -> None:
    """Move a joint graph that was traced on ``meta`` to the GPU: Inductor would drop results on ``meta``."""
    from torch.utils import _pytree as pytree

    for node in graph.nodes:
        if node.op != "output":
            node.args, node.kwargs = pytree.tree_map(_moved, node.args), pytree.tree_map(_moved, node.kwargs)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(_moved, node.meta["val"])


def _node(node: Any) -> Node | None:
    """Return the counts of a scheduled node; None: it launches nothing."""
    from torch._inductor import ir
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    moved = node.get_read_write_buffers_sizes()
    if not isinstance(node, ExternKernelSchedulerNode):
        return Node(node.get_name(), "triton", moved, 1, frozenset(one.get_name() for one in node.get_outputs()))
    name = str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)
    return Node(name, "opaque" if name.startswith("fastdiff.") else "extern", moved, 1)


def _is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _layout(node: fx.Node) -> Layout:
    value = node.meta["val"]
    return Layout(node.name, tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch."))


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward")
_OWN_PRODUCTS = ("short_attention", "short_attention_backward")
"""Of fastdiff's ops those that are products, too."""


def _is_product(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    own = of_fastdiff(node) and name in _OWN_PRODUCTS
    return node.op == "call_function" and (own or name in _PRODUCTS or name.startswith("_scaled_dot_product"))


def _product(node: fx.Node) -> Product:
    shapes = tuple(tuple(arg.meta["val"].shape) for arg in node.args if _is_tensor(arg))
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) and value[0] is not None else value
    out = tuple(first.shape) if isinstance(first, Tensor) else ()
    return Product(str(getattr(node.target, "_opname", "")), shapes, out)
