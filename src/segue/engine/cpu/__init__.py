"""The engine on a CPU: kernels, attention, forward."""
