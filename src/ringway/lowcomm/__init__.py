"""Low-communication training: sites train alone for many steps, and exchange what they have learned once in a while."""

from ringway.lowcomm.diloco import DiLoCo
from ringway.lowcomm.elastic import ElasticRounds
from ringway.lowcomm.plan import Link, Plan, measure_link, plan
from ringway.lowcomm.report import Report
from ringway.lowcomm.sparseloco import SparseLoCo

__all__ = ["DiLoCo", "SparseLoCo", "ElasticRounds", "plan", "Plan", "Link", "measure_link", "Report"]
