"""Forty posteriors of the kinds that applied statisticians have, on small data sets."""

from jobs.choices import CHOICES
from jobs.hierarchies import HIERARCHIES
from jobs.series import SERIES
from jobs.spatial import SPATIAL
from jobs.survival import SURVIVAL
from jobs.unseen import UNSEEN

JOBS = (*HIERARCHIES, *SPATIAL, *CHOICES, *SURVIVAL, *SERIES, *UNSEEN)
