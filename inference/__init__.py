"""The serving engine: continuous batching over a paged KV cache. Needs no web framework.

Nothing is re-exported here, so that `import inference.scheduler` stays free of torch at run time.
"""
