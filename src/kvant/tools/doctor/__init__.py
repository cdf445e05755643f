"""What ``kvant doctor`` finds out: the machine, every operator's path, whether the fused kernel is right."""

from kvant.tools.doctor.diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]
