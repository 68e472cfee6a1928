"""Coefficients of odd polynomials `p(s) = a s + b s^3 + c s^5` that drive singular values in (0, 1] towards 1.

A set is one triple `(a, b, c)` per iteration, applied in turn to a matrix divided by its Frobenius norm.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

Triple = tuple[float, float, float]

# Muon (Jordan 2024): one steep polynomial; it does not converge to 1 but keeps every value it has lifted near 1.
_STANDARD = ((3.4445, -4.7750, 2.0315),) * 5
# Steps tuned one by one for few iterations, as stated in section 3 of the design.
_TUNED3 = ((5.0067, -14.4125, 10.6001), (3.7534, -6.8083, 3.3840), (3.2080, -4.3501, 2.0330))
_TUNED4 = (
    (5.4261, -15.5285, 11.2657),
    (3.0766, -4.9701, 2.1297),
    (3.0008, -6.4486, 4.3696),
    (2.8386, -4.1421, 2.5758),
)
# Polar Express (arXiv 2505.16932), degree 5, l = 1e-3, cushion 0.02407: the first five steps.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# Minimax (notebooks/03_muon_coefficients.ipynb derives them): of all sets of as many steps, the least largest distance
# from 1 over singular values from s_min to 1, when the input of every step may be off by 1 %.
_MINIMAX3 = (  # s_min 0.02: 0.897..1.104
    (7.641780, -21.491012, 15.481631),
    (3.209269, -2.366460, 0.482320),
    (2.234652, -1.594580, 0.402861),
)
_MINIMAX4 = (  # s_min 0.005: 0.903..1.097
    (8.218601, -23.719981, 17.218525),
    (3.887076, -2.844956, 0.533867),
    (3.183422, -2.347560, 0.480304),
    (2.215241, -1.577287, 0.401203),
)
_MINIMAX5 = (  # s_min 0.002: 0.971..1.029
    (8.344204, -24.206054, 17.597537),
    (4.075693, -2.973427, 0.547813),
    (3.702420, -2.717441, 0.520058),
    (2.814080, -2.070311, 0.450996),
    (2.013372, -1.389026, 0.383987),
)


def _shrunk(triple: Triple, factor: float) -> Triple:
    """The polynomial of `s / factor`: `(a / factor, b / factor^3, c / factor^5)`."""
    a, b, c = triple
    return (a / factor, b / factor**3, c / factor**5)


def _polar_express() -> tuple[Triple, ...]:
    """Each step of an input 1.01 times smaller, for safety; the first also takes the published `1.01 x norm`."""
    first, *rest = (_shrunk(triple, 1.01) for triple in _POLAR_EXPRESS)
    return (_shrunk(first, 1.01), *rest)


NS_COEFFS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        "standard": _STANDARD,
        "tuned3": _TUNED3,
        "tuned4": _TUNED4,
        "polar_express": _polar_express(),
        "minimax3": _MINIMAX3,
        "minimax4": _MINIMAX4,
        "minimax5": _MINIMAX5,
    }
)


def ns_coefficients(coeffs: str | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    """The triples of a set.

    Args:
        coeffs: a name in `NS_COEFFS`, or one triple `(a, b, c)` per iteration.

    Raises:
        ValueError: if the name is unknown, there is no triple, or one has not three finite numbers.
        TypeError: if it is neither a name nor a sequence of triples.
    """
    if isinstance(coeffs, str):
        if coeffs not in NS_COEFFS:
            raise ValueError(
                f"`coeffs` must be one of {', '.join(NS_COEFFS)}, or a list of triples (a, b, c): got {coeffs!r}. "
                "Use 'standard', the default."
            )
        return NS_COEFFS[coeffs]
    try:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coeffs)
    except TypeError as error:
        raise TypeError(_refused(coeffs)) from error
    except ValueError as error:
        raise ValueError(_refused(coeffs)) from error
    if not triples or not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(_refused(coeffs))
    return triples


def _refused(coeffs: object) -> str:
    return (
        f"`coeffs` must be a name or one triple of finite numbers (a, b, c) per iteration: got {coeffs!r}. "
        "Use e.g. [(3.4445, -4.775, 2.0315)] * 5."
    )
