"""What a captured graph is made of, read from the CUDA driver."""

from __future__ import annotations

from kernels.launch_kernel import call_driver, open_driver

_NAME = "graph"


def count_kernel_nodes(graph: int) -> int | None:
    """Kernels that a replay of `graph` (a `CUgraph` handle) launches, of libraries as well. None if it holds graphs within.

    *Raises* `KernelLaunchError` without cuda-bindings, or for what the driver refuses.
    """
    driver = open_driver()
    kinds = driver.CUgraphNodeType
    handle = driver.CUgraph(graph)
    _, num_nodes = call_driver(_NAME, driver.cuGraphGetNodes, handle, 0)
    nodes, _ = call_driver(_NAME, driver.cuGraphGetNodes, handle, num_nodes)
    found = [call_driver(_NAME, driver.cuGraphNodeGetType, node) for node in nodes]
    return None if kinds.CU_GRAPH_NODE_TYPE_GRAPH in found else found.count(kinds.CU_GRAPH_NODE_TYPE_KERNEL)
