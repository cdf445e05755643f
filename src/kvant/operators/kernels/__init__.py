"""The fused decode kernel: quantized bytes in, attention out. One source for Metal and CUDA."""
