"""The pass's own primitives, each with its rules of differentiation, batching and lowering."""
