"""From a plan and a jaxpr to the rewritten jaxpr."""
