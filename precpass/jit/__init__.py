"""A function under a policy, called as `jax.jit` calls one."""
