"""The memory that a model may have on this machine. Imports torch when it is asked."""

from inference.fit import Machine


def this_machine(device: str, kv_memory_bytes: int | None = None) -> Machine:
    """
    Args:
        device: as in EngineConfig.
        kv_memory_bytes: most bytes of the KV pool; None for its usual share.

    Raises:
        ModelLoadError: the device is not there.
    """
    from inference.kv_cache import storage
    from inference.runner.choices import choose_device

    found = choose_device(device)
    on_cpu = found.type == "cpu"
    return Machine(
        name="this machine's memory" if on_cpu else f"the memory of {found}",
        free_bytes=storage.free_memory(found),
        kv_share=storage.CPU_MEMORY_SHARE if on_cpu else storage.CUDA_MEMORY_SHARE,
        max_full_contexts=storage.CPU_MAX_FULL_CONTEXTS if on_cpu else None,
        kv_bytes=kv_memory_bytes,
    )
