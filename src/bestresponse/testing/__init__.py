"""Problems whose answers are known, and the contract every method keeps. For own methods too.

::

    from bestresponse.testing import Case, Ends, MethodContract

    mine = Case("mine", MyMethod(), steps=500, ridge=Ends(excess=0.01, distance=0.01), quadratic=None)

    @pytest.mark.parametrize("case", [mine], ids=str)
    class TestMine(MethodContract):
        pass
"""

from bestresponse.testing.contract import Case, Ends, MethodContract
from bestresponse.testing.known import Quadratic, Ridge, TinyNet, net_problem

__all__ = ["Case", "Ends", "MethodContract", "Quadratic", "Ridge", "TinyNet", "net_problem"]
