begin;
do $$
begin
    if exists (
        select from loom_execution where id >= '2026-11' and id < '2026-12'
        and status not in ('COMPLETED', 'FAILED', 'CANCELLED', 'CONTINUED')
    ) then
        raise exception 'some of 2026-11 have not ended';
    end if;
end
$$;
drop table loom_event_2026_11;
delete from loom_execution where id >= '2026-11' and id < '2026-12';
delete from loom_timer where execution_id >= '2026-11' and execution_id < '2026-12';
delete from loom_message where execution_id >= '2026-11' and execution_id < '2026-12';
commit;
