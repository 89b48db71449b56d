"""Who trains with whom, where and when: an online scheduler for jobs that come and go, and its simulator."""

from scheduling.online.types import Fault as Fault
from scheduling.online.types import Job as Job
from scheduling.online.types import User as User
from scheduling.online.types import Worker as Worker
