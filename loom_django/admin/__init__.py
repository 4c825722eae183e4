"""The operator console. The classes are plain ones: a project may register subclasses of its own, on any site."""

from django.contrib import admin

from loom_django.admin.executions import ExecutionAdmin
from loom_django.admin.inline import ExecutionsInlineMixin
from loom_django.admin.rows import LeaseAdmin, TimerAdmin
from loom_django.admin.schedules import ScheduleAdmin
from loom_django.models import Execution, Lease, ScheduleState, Timer

__all__ = ["ExecutionAdmin", "ExecutionsInlineMixin", "LeaseAdmin", "ScheduleAdmin", "TimerAdmin"]

admin.site.register(Execution, ExecutionAdmin)
admin.site.register(Timer, TimerAdmin)
admin.site.register(Lease, LeaseAdmin)
admin.site.register(ScheduleState, ScheduleAdmin)
