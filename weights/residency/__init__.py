"""One core for every memory tier: what stays, who has it, who waits for room, who loads. Pure: no clock, no I/O."""

# Until the keeper and the modules stand on `entries.Book`.
from weights.residency.plans import (
    EvictionPlan as EvictionPlan,
)
from weights.residency.plans import (
    PrefetchPlan as PrefetchPlan,
)
from weights.residency.plans import (
    Resident as Resident,
)
from weights.residency.plans import (
    keep_values as keep_values,
)
from weights.residency.plans import (
    plan_eviction as plan_eviction,
)
from weights.residency.plans import (
    plan_prefetch as plan_prefetch,
)
from weights.residency.plans import (
    spare_the_valuable as spare_the_valuable,
)
from weights.residency.policy import Popularity as Popularity
