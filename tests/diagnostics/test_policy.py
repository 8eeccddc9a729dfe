"""`docs/diagnostics.md` quotes the thresholds that the code has."""

import dataclasses
import math
import string
from pathlib import Path

import pytest

import pyro_scale
from pyro_scale.calibration import results
from pyro_scale.core import stray
from pyro_scale.core.mixing import FAMILY_WISE
from pyro_scale.diagnostics import policy as judged
from pyro_scale.tuning import policy as tuned

PAGE = (Path(pyro_scale.__file__).parents[1] / "docs" / "diagnostics.md").read_text()
NUMBERS = {"FAMILY_WISE": FAMILY_WISE} | vars(results) | vars(tuned) | vars(judged) | vars(stray)
WORDS = {0.1: "a tenth", 0.5: "half", 2.0: "twice", 3.0: "three", 5.0: "five"}
#: What the page says, with the fields that its numbers are.
SENTENCES = """\
(of up to {MIXING.elements})
above {MIXING.agree} not known, above {MIXING.disagree} NO, if chance does not explain it
(family-wise {FAMILY_WISE:.0%}, see below)
warns above {MIXING.disagree}; with fewer than {MIXING.many_draws} draws, or {MIXING.many_per_chain}
above {MIXING.disagree_of_few}; with fewer than {MIXING.few_per_chain} per chain never
under {MIXING.many_draws} not known, with the number of draws to ask for
above {MIXING.agree} and not by chance; under {MIXING.many_draws}; one chain;
; one chain; under {MIXING.fewest_per_chain} draws |
report, `mixing` | under {MIXING.many_draws} |
more than {MIXING.remembered:word} of the variance, and surely for some of it
(F test at {MIXING.false_alarms}, over the number of elements)
line (for {MIXING.predicted_rows} training rows)
R-hat of {MIXING.predicted_rows} training rows' predictions
R-hat of {MIXING.disagree} or more: the verdict is ENSEMBLE
| R-hat above {MIXING.disagree} |
a NUTS with R-hat below {MIXING.agree} and no divergences
surely outside of 0.9 to {TEMPERATURE.hot}, by {TEMPERATURE.errors:word} standard errors
at a family-wise {FAMILY_WISE:.0%} (NO)
error above ${TEMPERATURE.wide:g} \\sqrt{{2 / n}}$ for n draws, at most {MIXING.many_draws}
above {TOLERANCE.sd:.0%}, and more than {TEMPERATURE.heavy:word} that of a normal distribution
above {TEMPERATURE.hot} (NO if measured on all rows; if measured on some batches NOT KNOWN,
and NO above {TEMPERATURE.surely_hot}). `diagnostics()` warns above {TEMPERATURE.hot},
above {TEMPERATURE.hot} on all rows; above {TEMPERATURE.surely_hot} on some batches
a position beyond ${EXPLOSION.distance:power}$ in unconstrained space
more than {EXPLOSION.hot:g} times too hot and
and more than {EXPLOSION.hot:g} times hotter than the first
no draw at a mode that should have {MIXING.missed_draws:word} |
no draw at a mode with over {MIXING.missed:.0%} of the posterior
a log joint of all rows below that of {STRAY.upper:.0%} of draws by more than the limit
tail beyond $q_{{{STRAY.lower}}}$ is that of an exponential variable
The limit is $q_{{{STRAY.upper}}} + {STRAY.margin:g} s \\log n$, with s of at least 1 nat
Up to {STRAY.checked} draws that are beyond the limit
| alarm | above {WEIGHTS.pareto_k} |
| above {WEIGHTS.pareto_k} (with S draws, above $1 - 1/\\log_{{10}} S$ if that is smaller)
the run takes {WEIGHTS.more_draws} times as many
above {WEIGHTS.spread} is a NO
above {WEIGHTS.error}: k is NaN
a gap above {GRADIENTS.gap} nats, and more than {GRADIENTS.errors:word} errors of the integral
over up to {GRADIENTS.pairs} pairs of draws
in {GRADIENTS.panels} panels
is halved {GRADIENTS.halvings} times
for each of at least {GRADIENTS.fewest_pairs} pairs
the density is that of {GRADIENTS.rows:,} of them
placed at each of {NODES.draws} draws, for up to {NODES.units:,} units
and {NODES.errors} standard errors are added
if the difference has an sd above {NODES.spread} nats
means within {TOLERANCE.mean} sds and sds within {TOLERANCE.sd:.0%}
surely above {TOLERANCE.mean} sds, or {TOLERANCE.sd:.0%} of an sd (NO)
The pilots aim at {PILOTS.mean_bias} sds and {PILOTS.sd_bias:.0%}
GHMC aims at {ACCEPTANCE.target}; its tuning stops between 0.85 and 0.93
R-hat of {WARM_UP.most_r_hat} or more or a change of {WARM_UP.most_change} or more
a predicted error above {STEP_SIZE.large_error:g} sd (a warning)
changes by less than ${TRAINING.small_change} \\sqrt{{D}}$ nats from the third quarter to the last
under {SIMULATIONS.least_ess} effective draws
| more than {MOST_DOUBTFUL:.0%} together
| above {SIGNIFICANT} | {SIGNIFICANT} or less: MISCALIBRATED |""".splitlines()
#: Thresholds of verdicts that the page does not give.
NOT_ON_THE_PAGE = {
    "MIXING.apart",
    "MIXING.draws_at_modes",
    "MIXING.few_accepted",
    "MIXING.few_effective",
    "MIXING.many_chains",
    "MIXING.stays",
    "TEMPERATURE.fewest_draws",
    "TEMPERATURE.fewest_moments",
    "TEMPERATURE.one_sided",
    "EXPLOSION.fallen",
    "EXPLOSION.fewest_draws",
    "GRADIENTS.fraction",
    "WEIGHTS.fewest_draws",
}


class Sentence(string.Formatter):
    def format_field(self, value, spec):
        if spec == "word":
            return WORDS[value]
        if spec == "power":
            return f"10^{{{math.log10(value):.0f}}}"
        return super().format_field(value, spec)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_page_has_the_numbers_of_the_code(sentence):
    assert Sentence().vformat(sentence, (), NUMBERS) in PAGE


def test_the_page_has_every_threshold():
    quoted = {name for each in SENTENCES for _, name, *_ in Sentence().parse(each) if name}
    fields = {
        f"{name}.{field.name}"
        for name, group in vars(judged).items()
        if dataclasses.is_dataclass(group) and not isinstance(group, type)
        for field in dataclasses.fields(group)
    }
    assert fields - quoted == NOT_ON_THE_PAGE


def test_words_are_those_of_the_temperature():
    """0.9 to 1.1, and 0.9025 to 1.1025 where sds are within 5%."""
    sd, hot = tuned.TOLERANCE.sd, judged.TEMPERATURE.hot
    assert f"outside of {2 - hot:.1f} to {hot}" in PAGE
    assert f"outside of {(1 - sd) ** 2:.4f} to {(1 + sd) ** 2:.4f}" in PAGE


def test_words_are_those_of_acceptances():
    """A step that is settled has an acceptance of 0.85 to 0.93: the spread of the energy goes as
    the cube of the step."""
    from statistics import NormalDist

    normal, settled = NormalDist(), tuned.ACCEPTANCE.settled
    spread = -2 * normal.inv_cdf(tuned.ACCEPTANCE.target / 2)
    ends = [2 * normal.cdf(-spread * factor**3 / 2) for factor in (settled, 1 / settled)]
    assert ends == pytest.approx([0.85, 0.93], abs=0.006)
