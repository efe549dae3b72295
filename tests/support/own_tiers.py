"""Sets of tiers other than the default one."""

from slo.tiers import Tier, TierPolicy, TierSet

TEXT, IMAGE, SEARCH, FILE = (Tier(name) for name in ("text", "image", "search", "file"))

FOUR = TierSet(
    {
        TEXT: TierPolicy(0.3, 0.04, sheddable=False, weight=8.0, share=0.4, service_tiers=("priority",)),
        IMAGE: TierPolicy(0.8, 0.06, sheddable=True, weight=4.0, share=0.3),
        SEARCH: TierPolicy(2.0, None, sheddable=True, weight=2.0, share=0.2, target=0.95),
        FILE: TierPolicy(None, None, sheddable=True, weight=1.0, share=0.1, service_tiers=("flex", "batch")),
    },
    default=SEARCH,
)
SEVEN = TierSet(
    {
        Tier(f"class-{number}"): TierPolicy(
            0.1 * number, None, sheddable=number != 6, weight=2.0 ** (7 - number), share=0.1
        )
        for number in range(1, 8)
    },
    default=Tier("class-4"),
)
"""From class-1, the top, to class-7; class-6 may not be shed."""
ONE = TierSet({TEXT: TierPolicy(0.3, None, sheddable=True, weight=1.0, share=1.0)}, default=TEXT)
