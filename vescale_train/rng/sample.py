"""Random words to numbers: each function is elementwise and made of exactly rounded operations only.

So a number depends on its own words and on nothing else: not on its place in memory, on the type of CPU, or on the
device. That is why logarithms are written out here: a library's differ in the last bit from one processor to the next.
All take int64 words in ``[0, 2^32)`` and return float64, int64 or bool.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_TWO32 = 4294967296.0
_CENTRE = 0.425
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LOG_TERMS = 12

# The normal quantile after Wichura, "Algorithm AS 241", Applied Statistics 37 (1988); numerators, then denominators.
# fmt: off
_CENTRAL = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080),
    (5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
     5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0),
)
_TAIL = (
    (7.74545014278341407640e-4, 0.0227238449892691845833, 0.241780725177450611770, 1.27045825245236838258,
     3.64784832476320460504, 5.76949722146069140550, 4.63033784615654529590, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 0.0151986665636164571966, 0.148103976427480074590,
     0.689767334985100004550, 1.67638483018380384940, 2.05319162663775882187, 1.0),
)
# fmt: on


def uniform(words: torch.Tensor, digits: int) -> torch.Tensor:
    """Return numbers in ``[0, 1)`` of at most ``digits`` binary digits, of which there are at most 32."""
    return (words >> (32 - digits)).to(torch.float64).mul_(2.0**-digits)


def open_uniform(words: torch.Tensor) -> torch.Tensor:
    """Return the midpoints of the 2^32 parts of (0, 1): exact, never 0 or 1."""
    return words.to(torch.float64).add_(0.5).mul_(1 / _TWO32)


def bernoulli(words: torch.Tensor, probability: float) -> torch.Tensor:
    """Return True with a probability, to the nearest 2^-32."""
    return words < round(probability * _TWO32)


def integers(words: torch.Tensor, low: int, count: int) -> torch.Tensor:
    """Return one of ``count <= 2^63`` integers from ``low`` on for each pair of words in the last dim.

    Some integers are likelier than others by at most ``count / 2^63``.
    """
    wide = ((words[..., 1] & 0x7FFFFFFF) << 32) | words[..., 0]
    return wide.remainder_(count).add_(low) if count < 1 << 63 else wide


def normal(words: torch.Tensor) -> torch.Tensor:
    """Return the standard normal quantile at the midpoints of the 2^32 parts of (0, 1): up to 6.2 in size."""
    return quantile(words.to(torch.float64).sub_((_TWO32 - 1) / 2).mul_(1 / _TWO32))


def quantile(centred: torch.Tensor) -> torch.Tensor:
    """Return the standard normal quantile of ``0.5 + centred``, for ``centred`` in (-0.5, 0.5) by 1e-11 and more.

    Taking the distance from the middle keeps both tails exact.
    """
    r = 0.180625 - centred * centred
    out = _ratio(_CENTRAL, r).mul_(centred)
    size = centred.abs()
    tail = (size > _CENTRE).nonzero(as_tuple=True)
    r = _sqrt(log(0.5 - size[tail]).neg_()).sub_(1.6)
    out[tail] = _ratio(_TAIL, r).mul_(centred[tail].sign())
    return out


def truncated_normal(words: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return standard normal numbers of the part between two bounds: the quantile of what lies between theirs."""
    lower, upper = _centred_cdf(low), _centred_cdf(high)
    centred = open_uniform(words).mul_(upper - lower).add_(lower)
    limit = 0.5 - 1e-10
    return quantile(centred.clamp_(-limit, limit)).clamp_(low, high)


def exponential(words: torch.Tensor) -> torch.Tensor:
    """Return exponential numbers of rate 1; never 0."""
    return log(open_uniform(words)).neg_()


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of positive normal float64 numbers, within about 1 unit of the last place."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponents = (exponent - small.to(exponent.dtype)).to(torch.float64)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / (2 * _LOG_TERMS + 1))
    for term in range(_LOG_TERMS - 1, 0, -1):
        series.mul_(square).add_(1 / (2 * term + 1))
    fraction = series.mul_(square).mul_(s).add_(s).mul_(2)
    return (exponents * _LN2_LOW).add_(fraction).add_(exponents * _LN2_HIGH)


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], r: torch.Tensor) -> torch.Tensor:
    above, below = (_polynomial(c, r) for c in coefficients)
    return above.div_(below)


def _polynomial(coefficients: tuple[float, ...], r: torch.Tensor) -> torch.Tensor:
    """Return a polynomial by Horner's rule; multiplication and addition apart, so that no processor fuses them."""
    out = torch.full_like(r, coefficients[0])
    for coefficient in coefficients[1:]:
        out.mul_(r).add_(coefficient)
    return out


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the exactly rounded root: torch's on a CPU is a vector library's, which may miss the last bit."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else torch.sqrt(x)


def _centred_cdf(x: float) -> float:
    """Return the standard normal distribution function less one half."""
    return 0.5 * math.erf(x / math.sqrt(2))
