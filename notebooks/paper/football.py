"""A filter on fifteen seasons of football: the skill of teams over time.

The library of "Scalable Bayesian Learning with posteriors" (Duffield et al., ICLR 2025) has an
example of this kind on two seasons of the English Premier League; the paper itself only says that
it has extended Kalman filters (section 3.1, A.4), so there is no figure of its own to reproduce,
and nothing was scaled down.  Here `ps.EKF` goes through 15 seasons, 5,700 matches, day by day: it
forecasts the day's matches, home win, draw or away win, and then absorbs their results.

Two models: `outcomes` knows who won (Davidson's model, in which Elo ratings are point estimates),
`goals` how many goals there were (Poisson).  A new season begins with what was known at the end of
the last, wider by a summer; promoted teams come in with a prior of their own.

What is beside it: the frequencies of the three outcomes in all matches until then; and Elo ratings
with a home advantage, ratings drawn to the mean in summer, promoted teams that start lower, and
Davidson's probabilities of the rating difference; once as they are, and once with steps that grow
with the goal difference.

Hyperparameters of all of them are those of least log loss in seasons 2 to 5, by Nelder and Mead's
method: 40 passes for a filter, 2,000 for Elo.  Seasons 6 to 15 are reported, and were used for
nothing else.

    OMP_NUM_THREADS=1 python notebooks/paper/football.py

Writes football.json and football.png beside this file; it takes about half an hour of two cores.
The data are in $PYRO_SCALE_DATA (../shared/data by default), where a file load.py reads them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import scipy.optimize
import torch
from data_folder import DATA, loader
from results import mean_and_error, rounded
from torch import Tensor

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
#: Seasons that hyperparameters are chosen on, of which the first is not scored.
CHOSEN_ON = 5
#: What home advantage, and whatever else is the same for all teams, moves a day, over what a skill
#: does.
SLOWER = 0.2


class Season(NamedTuple):
    """Matches in the order of their days.

    Attributes:
        name: such as "2015-16".
        teams: names; matches count them from 0.
        date: of each match, `[matches]`.
        home: the team at home, `[matches]`.
        away: the other one.
        goals: of both, `[matches, 2]`.
    """

    name: str
    teams: list[str]
    date: np.ndarray
    home: Tensor
    away: Tensor
    goals: Tensor

    @property
    def result(self) -> Tensor:
        """0 where the home team lost, 1 for a draw, 2 where it won, `[matches]`."""
        return 1 + torch.sign(self.goals[:, 0] - self.goals[:, 1]).long()

    def days(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """A day's matches, as the models take them."""
        for day in np.unique(self.date):
            on = torch.as_tensor(self.date == day)
            yield self.home[on], self.away[on], self.goals[on]


class Gaussian(NamedTuple):
    """What is known of a season's teams: skills, kind by kind, then two numbers of the league."""

    mean: Tensor
    covariance: Tensor


class Choice(NamedTuple):
    """What is chosen for a filter.

    Args:
        drift: by how much a skill moves from one match day to the next, an sd.
        summer: the same between seasons.
        keep: what is left of a skill after a summer, of 1.
        promoted: a promoted team's skill, the mean; the teams there are being about 0.
        promoted_sd: its sd.
    """

    drift: float = 0.02
    summer: float = 0.15
    keep: float = 0.95
    promoted: float = -0.4
    promoted_sd: float = 0.3


class Elo(NamedTuple):
    """What is chosen for Elo ratings, in nats of the odds rather than in points of 400/log(10).

    Args:
        step: K, by which a rating moves after a surprise of 1.
        edge: the home team's advantage.
        slope: of the forecast's log odds in the difference of ratings.
        tie: log odds of a draw between equals.
        keep: what is left of a rating after a summer, of 1.
        promoted: a promoted team's rating.
        margin: the power of 1 + goal difference that the step is multiplied by.
    """

    step: float = 0.1
    edge: float = 0.4
    slope: float = 1.0
    tie: float = -0.3
    keep: float = 0.9
    promoted: float = -0.5
    margin: float = 0.0


def seasons(data: dict[str, Any]) -> list[Season]:
    """The data, as load.py or `made_up` has them, season by season."""
    found = []
    for name in sorted(set(data["season"])):
        on = np.array(data["season"]) == name
        ids, place = np.unique(data["home"][on], return_inverse=True)
        goals = np.stack([data["home_goals"][on], data["away_goals"][on]], 1)
        away = np.searchsorted(ids, data["away"][on])
        names = [data["teams"][i] for i in ids]
        tensors = (torch.as_tensor(a) for a in (place, away, goals))
        found.append(Season(name, names, data["date"][on], *tensors))
    return found


def load() -> list[Season] | None:
    """All seasons, or None where the data are missing."""
    data = loader()
    return None if data is None else seasons(data.load_football())


def made_up(num_seasons: int = 2, seed: int = 0) -> list[Season]:
    """A league of 20 teams whose skills drift; in place of data that are missing."""
    random = np.random.default_rng(seed)
    skill, pairs = random.normal(0, 0.3, 20), np.argwhere(~np.eye(20, dtype=bool))
    columns: dict[str, list[Any]] = {k: [] for k in ("date", "season", "pair", "goals")}
    for season in range(num_seasons):
        for match, (home, away) in enumerate(random.permutation(pairs)):
            skill = skill + random.normal(0, 0.003, 20)
            rates = np.exp(
                0.1 + np.array([0.3, 0]) + (skill[home] - skill[away]) * np.array([1, -1])
            )
            day = np.datetime64("2001-08-01") + 365 * season + 3 * (match // 4)
            row = (day, f"{2001 + season}-{2 + season:02}", (home, away), random.poisson(rates))
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    pair, goals = np.array(columns["pair"]), np.array(columns["goals"])
    return seasons(
        {"date": np.array(columns["date"]), "season": columns["season"], "home": pair[:, 0]}
        | {"away": pair[:, 1], "home_goals": goals[:, 0], "away_goals": goals[:, 1]}
        | {"teams": [f"Team {i + 1}" for i in range(20)]}
    )


# -- two models -------------------------------------------------------------------------------


def outcomes(known: Gaussian) -> Callable[..., None]:
    """Davidson's model of who wins: the odds are those of the difference of two skills."""

    def model(home: Tensor, away: Tensor, goals: Tensor | None = None) -> None:
        state = pyro.sample("state", dist.MultivariateNormal(*known))
        skill, edge, tie = state[:-2], SLOWER * state[-2], SLOWER * state[-1]
        result = None if goals is None else 1 + torch.sign(goals[:, 0] - goals[:, 1]).long()
        with pyro.plate("matches", len(home)):
            half = (skill[home] - skill[away] + edge) / 2
            logits = torch.stack([-half, tie.expand(len(home)), half], -1)
            pyro.sample("result", dist.Categorical(logits=logits), obs=result)

    return model


def goals(known: Gaussian) -> Callable[..., None]:
    """Poisson goals, of one team's attack against the other's defence."""

    def model(home: Tensor, away: Tensor, goals: Tensor | None = None) -> None:
        state = pyro.sample("state", dist.MultivariateNormal(*known))
        attack, defence = state[:-2].chunk(2)
        edge, level = SLOWER * state[-2], SLOWER * state[-1]
        with pyro.plate("matches", len(home)):
            at_home = torch.exp(level + edge / 2 + attack[home] - defence[away])
            at_away = torch.exp(level - edge / 2 + attack[away] - defence[home])
            observed = (None, None) if goals is None else goals.T
            pyro.sample("home_goals", dist.Poisson(at_home), obs=observed[0])
            pyro.sample("away_goals", dist.Poisson(at_away), obs=observed[1])
            pyro.deterministic("result", who_wins(at_home, at_away))

    return model


def who_wins(at_home: Tensor, at_away: Tensor) -> Tensor:
    """Probabilities of away win, draw and home win, of Poisson goals at these rates, `[..., 3]`."""
    count = torch.arange(16.0)
    home, away = (dist.Poisson(r[..., None]).log_prob(count).exp() for r in (at_home, at_away))
    before = away.cumsum(-1) - away  # fewer goals than this many
    win, draw = (home * before).sum(-1), (home * away).sum(-1)
    return torch.stack([1 - win - draw, draw, win], -1)


# -- the filter -------------------------------------------------------------------------------


def beginning(kinds: int) -> Gaussian:
    """Of 20 teams, and a league, of which nothing is known."""
    sds = torch.cat([torch.full((20 * kinds,), 0.7 / kinds), torch.full((2,), 1 / SLOWER)])
    return Gaussian(torch.zeros(len(sds)), sds.square().diag())


def after_summer(
    known: Gaussian, teams: list[str], now: list[str], kinds: int, choice: Choice
) -> Gaussian:
    """What was known of last season's teams, of this season's."""
    count = 20 * kinds
    mean, covariance = torch.zeros(count + 2), torch.zeros(count + 2, count + 2)
    mean[:count] = choice.promoted
    covariance[:count, :count] = choice.promoted_sd**2 * torch.eye(count)
    stay = [(teams.index(team), now.index(team)) for team in now if team in teams]
    pairs = [(old + 20 * kind, new + 20 * kind) for kind in range(kinds) for old, new in stay]
    old, new = torch.tensor([*pairs, (count, count), (count + 1, count + 1)]).T
    keep = torch.tensor([choice.keep] * len(pairs) + [1.0, 1.0])
    mean[new] = keep * known.mean[old]
    held = keep * known.covariance[old[:, None], old] * keep[:, None]
    covariance[new[:, None], new] = held + choice.summer**2 * torch.eye(len(old))
    return Gaussian(mean, covariance)


class Pass(NamedTuple):
    """A pass through seasons.

    Attributes:
        probs: forecasts, `[matches, 3]`, by season.
        skill: by season, means and sds after each day, `[days, 2, teams]`, of a team's skill over
            the mean of all; of the first kind.
    """

    probs: list[Tensor]
    skill: list[Tensor]


def passed(played: list[Season], league: Any, choice: Choice, **settings: Any) -> Pass:
    """Goes through the seasons day by day: forecasts, then absorbs."""
    pyro.set_rng_seed(0)
    kinds = 2 if league is goals else 1
    known, probs, skill = beginning(kinds), [], []
    for before, season in zip([None, *played], played, strict=False):
        if before is not None:
            known = after_summer(known, before.teams, season.teams, kinds, choice)
        forecasts, path = [], []
        # the likelihood to the power of nearly 0: a filter that knows the prior
        ekf = ps.EKF(league(known), structure="dense", lr=1e-12)
        ekf.step(*next(season.days()))
        following = ps.EKF(league(known), structure="dense", transition_sd=choice.drift, **settings)
        for home, away, scored in season.days():
            forecasts.append(ekf.predict(home, away, reduce="mean")["result"])
            ekf = following
            ekf.step(home, away, scored)
            known = Gaussian(ekf.fit.gaussians[0].mean, ekf.fit.gaussians[0].covariance)
            path.append(over_the_mean(known))
        probs.append(torch.cat(forecasts))
        skill.append(torch.stack(path))
    return Pass(probs, skill)


def over_the_mean(known: Gaussian) -> Tensor:
    """Means and sds of 20 skills over their mean, which is all that matches tell, `[2, 20]`."""
    center = torch.eye(20) - 1 / 20
    covariance = center @ known.covariance[:20, :20] @ center
    return torch.stack([center @ known.mean[:20], covariance.diagonal().sqrt()])


# -- what is beside it ------------------------------------------------------------------------


def elo(played: list[Season], choice: Elo) -> list[Tensor]:
    """Forecasts `[matches, 3]`, by season."""
    ratings = dict.fromkeys(played[0].teams, 0.0)
    found = []
    for season in played:
        ratings = {
            team: choice.keep * ratings[team] if team in ratings else choice.promoted
            for team in season.teams
        }
        gaps = []
        for home, away, (scored, conceded) in zip(
            season.home.tolist(), season.away.tolist(), season.goals.tolist(), strict=True
        ):
            one, other = season.teams[home], season.teams[away]
            gap = ratings[one] - ratings[other] + choice.edge
            won = (1 + np.sign(scored - conceded)) / 2
            size = choice.step * (1 + abs(scored - conceded)) ** choice.margin
            moved = size * (won - 1 / (1 + np.exp(-gap)))
            ratings[one] += moved
            ratings[other] -= moved
            gaps.append(gap)
        half = choice.slope * torch.tensor(gaps) / 2
        logits = torch.stack([-half, torch.full_like(half, choice.tie), half], -1)
        found.append(logits.softmax(-1))
    return found


def frequencies(played: list[Season]) -> list[Tensor]:
    """How often each outcome was there before, `[matches, 3]`, by season."""
    one_hot = torch.nn.functional.one_hot(torch.cat([s.result for s in played]), 3).double()
    counts = 1 + one_hot.cumsum(0) - one_hot
    return list((counts / counts.sum(1, keepdim=True)).split([len(s.home) for s in played]))


def losses(played: list[Season], probs: list[Tensor]) -> list[Tensor]:
    """Of each match, in nats, by season."""
    pairs = zip(played, probs, strict=True)
    return [-p.double()[torch.arange(len(p)), s.result].log() for s, p in pairs]


# -- the run ----------------------------------------------------------------------------------


def chosen(forecast: Callable[[Any], list[Tensor]], start: Any, played: list[Season], passes: int):
    """The choice of least log loss in seasons 2 to 5, by Nelder and Mead's method; what is
    positive is searched as its logarithm."""
    first = np.array(start)
    logs = first > 0

    def choice(at: np.ndarray) -> Any:
        return type(start)(*np.where(logs, np.exp(np.where(logs, at, 0)), at).tolist())

    def loss(at: np.ndarray) -> float:
        return float(torch.cat(losses(played, forecast(choice(at)))[1:]).mean())

    origin = np.where(logs, np.log(np.where(logs, first, 1)), first)
    width = np.where(logs, 0.4, 0.2)
    if "keep" in start._fields:
        width[start._fields.index("keep")] = -0.1
    simplex = np.vstack([origin, origin + np.diag(width)])
    options = {"initial_simplex": simplex, "maxfev": passes, "xatol": 1e-3, "fatol": 1e-6}
    found = scipy.optimize.minimize(loss, origin, method="Nelder-Mead", options=options)
    return choice(found.x), float(found.fun)


def filtered(name: str) -> tuple[Choice, float, Pass, float]:
    """A model's choice, its log loss in the seasons that it was chosen on, a pass with it through
    all seasons, and seconds."""
    torch.set_num_threads(1)
    begun, played, league = (
        time.perf_counter(),
        load(),
        {"outcomes": outcomes, "goals": goals}[name],
    )
    assert played is not None
    early = played[:CHOSEN_ON]
    start = Choice() if league is outcomes else Choice(0.01, 0.08, 0.95, -0.2, 0.15)
    choice, loss = chosen(lambda c: passed(early, league, c).probs, start, early, 40)
    return choice, loss, passed(played, league, choice), time.perf_counter() - begun


def rated(margin: float) -> tuple[Elo, float, list[Tensor]]:
    """The same for Elo ratings, without seconds; margin 0 stays 0."""
    played = load()
    assert played is not None
    early, start = played[:CHOSEN_ON], Elo(margin=margin)
    fixed = (lambda c: c) if margin else (lambda c: c._replace(margin=0.0))
    choice, loss = chosen(lambda c: elo(early, fixed(c)), start, early, 2000)
    return fixed(choice), loss, elo(played, fixed(choice))


def main() -> None:
    """The whole run."""
    played = load()
    if played is None:
        raise SystemExit(f"no data in {DATA}: set PYRO_SCALE_DATA")
    probs = {"frequencies": frequencies(played)}
    report: dict[str, Any] = {"chosen": {}}
    with ProcessPoolExecutor(2) as pool:
        filters = list(pool.map(filtered, ("outcomes", "goals")))
        ratings = list(pool.map(rated, (0.0, 0.5)))
    for known, elo_s, filter_s in zip(("outcomes", "goals"), ratings, filters, strict=True):
        rating, loss, probs[f"Elo, {known}"] = elo_s
        report["chosen"][f"Elo, {known}"] = rating._asdict() | {"loss": loss}
        choice, loss, run, seconds = filter_s
        probs[f"EKF, {known}"] = run.probs
        report["chosen"][f"EKF, {known}"] = choice._asdict() | {"loss": loss, "seconds": seconds}
    report |= scores(played, probs)
    report["skill"] = skills(played, filters[0][2])
    versions = {"torch": torch.__version__, "pyro-scale": importlib.metadata.version("pyro-scale")}
    report |= {"versions": versions, "threads": 1, "processes": 2}
    (HERE / "football.json").write_text(json.dumps(rounded(report)) + "\n")
    plotted(report).savefig(HERE / "football.png", dpi=110)


def scores(played: list[Season], probs: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Log losses of the seasons after those that the choices were made on, with their differences;
    errors are over seasons, whose matches have in common what is hard to foresee."""
    table = {name: losses(played, p)[CHOSEN_ON:] for name, p in probs.items()}
    by_season = {name: torch.stack([x.mean() for x in loss]) for name, loss in table.items()}
    pairs = [("EKF, outcomes", "frequencies"), ("EKF, outcomes", "Elo, outcomes")]
    pairs += [("EKF, goals", "frequencies"), ("EKF, goals", "Elo, goals")]
    pairs += [("EKF, goals", "EKF, outcomes"), ("EKF, goals", "Elo, outcomes")]
    pairs += [("EKF, outcomes", "Elo, goals"), ("Elo, goals", "Elo, outcomes")]
    return {
        "matches": sum(len(season.home) for season in played[CHOSEN_ON:]),
        "seasons": [season.name for season in played[CHOSEN_ON:]],
        "loss": {name: float(loss.mean()) for name, loss in by_season.items()},
        "by_season": {name: loss.tolist() for name, loss in by_season.items()},
        "difference": {
            f"{a} - {b}": mean_and_error((by_season[a] - by_season[b]).tolist()) for a, b in pairs
        },
    }


#: Teams in the figure, and of how many match days it has one.
SHOWN = ("Manchester City", "Leicester City", "Chelsea", "Norwich City")
EVERY = 3


def skills(played: list[Season], run: Pass) -> dict[str, Any]:
    """What the figure needs: dates, and by team a day's mean and sd, None in other leagues."""
    dates = [str(day) for season in played for day in np.unique(season.date)]
    found: dict[str, Any] = {"date": dates[::EVERY]}
    for team in SHOWN:
        rows: list[Any] = []
        for season, path in zip(played, run.skill, strict=True):
            at = season.teams.index(team) if team in season.teams else None
            rows += [None] * len(path) if at is None else path[:, :, at].tolist()
        found[team] = rows[::EVERY]
    return found


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7")


def plotted(report: dict[str, Any]) -> plt.Figure:
    """Skills over time; each season's log loss below that of frequencies."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 7.5), height_ratios=(2, 1))
    dates = np.array(report["skill"]["date"], dtype="datetime64[D]")
    champions = np.datetime64("2015-08-01"), np.datetime64("2016-06-01")
    above.axvspan(*champions, color="0.9", label="2015-16")
    for team, color in zip(SHOWN, COLOURS, strict=False):
        mean, sd = np.array([row or (np.nan,) * 2 for row in report["skill"][team]], float).T
        # a gap at every summer, and where the team was in another league
        apart = np.flatnonzero(np.diff(dates).astype(int) > 45) + 1
        for part, at in enumerate(np.split(np.arange(len(dates)), apart)):
            label = team if part == 0 else None
            above.plot(dates[at], mean[at], color=color, lw=1.5, label=label)
            above.fill_between(
                dates[at], (mean - sd)[at], (mean + sd)[at], color=color, alpha=0.2, lw=0
            )
    above.set(
        ylabel="skill over the league's mean, ± sd\n(nats of the odds; EKF, outcomes)",
        xlim=(dates[0], dates[-1]),
    )
    above.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    base = np.array(report["by_season"]["frequencies"])
    at = np.arange(len(base))
    styles = {"Elo, outcomes": "s", "EKF, outcomes": "o", "Elo, goals": "^", "EKF, goals": "D"}
    for (name, marker), color in zip(styles.items(), COLOURS[1:] + COLOURS[:1], strict=False):
        line = base - np.array(report["by_season"][name])
        below.plot(at, line, marker=marker, color=color, lw=1, label=name)
    below.axhline(0, color="0.5", lw=0.8)
    below.set_xticks(at, report["seasons"], fontsize=8)
    below.set(ylabel="log loss below that of\nfrequencies (nats a match)")
    below.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    main()
