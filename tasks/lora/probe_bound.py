"""How probable it is that random probes miss a damage: a bound that holds for every damage, whatever its form.

Letters: D a projection's delta in the source, F what the output has in excess of it, with ||F|| >= damage * ||D|| in
the Frobenius norm; W (k, out) and X (in, k) independent standard normal numbers. The damage is missed only if
||W F X|| <= t * ||W D X|| for a t that the arithmetic gives.

For s < k/2, E ||W F X||^(-2s) <= ||F||^(-2s) * m(-s)^2 with m(q) = E (chi^2_k)^q = 2^q * Gamma(k/2 + q) / Gamma(k/2):
given X, ||W F X||^2 is a sum of independent chi^2_k with the squared singular values of F X as weights, and a negative
power of that is convex in the weights, so that its mean is largest where one weight is all (a damage of rank one);
likewise once more for X. For p >= 1 in the same way E ||W D X||^(2p) <= ||D||^(2p) * m(p)^2. With Markov's inequality,
for every e > 0:

    P(miss) <= P(||W F X|| <= e * ||F||) + P(||W D X|| >= e * damage / t * ||D||)
            <= e^(2s) * m(-s)^2          + (t / (damage * e))^(2p) * m(p)^2

and `bound_miss` takes the best e, s and p of a grid, which any of them would do for.
"""

from __future__ import annotations

import math
from functools import cache

_STEPS = 100
_LARGEST_POWER = 200


@cache
def bound_miss(probes: int, *, damage: float, threshold: float) -> float:
    """Return an upper bound of the probability that `probes` probes a side miss a damage.

    damage: relative to the delta, Frobenius norm. threshold: t, the relative difference of the probed deltas that is
    still taken for equal.
    """
    ratio = threshold / damage
    if ratio >= 1:
        return 1.0
    negative = [(power, _log_moment(probes, power)) for power in _list_negative(probes)]
    positive = [(power, _log_moment(probes, power)) for power in range(1, _LARGEST_POWER)]
    best = 0.0
    for step in range(1, _STEPS):
        # The norm of probes is about k times what is probed, so that e lies between t / damage and k.
        log_e = math.log(ratio) * (1 - step / _STEPS) + math.log(probes) * step / _STEPS
        small = min(-2 * power * log_e + 2 * moment for power, moment in negative)
        large = min(2 * power * (math.log(ratio) - log_e) + 2 * moment for power, moment in positive)
        best = min(best, max(small, large) + math.log(2))
    return math.exp(best)


def _list_negative(probes: int) -> list[float]:
    """Return -s for every s of the grid."""
    return [-probes / 2 * step / 64 for step in range(1, 64)]


def _log_moment(probes: int, power: float) -> float:
    """Return the logarithm of E (chi^2_probes)^power."""
    return power * math.log(2) + math.lgamma(probes / 2 + power) - math.lgamma(probes / 2)
