"""The JAX backend: meshes, the two views of a step, state, batches, reductions.

`engine.engine` is what the rest of the package calls. A train step is compiled in
the replica view (`replica_view`) where `rows` finds that each row's result depends
on that row alone, else in the global view (`global_view`); `steps` decides.
"""
