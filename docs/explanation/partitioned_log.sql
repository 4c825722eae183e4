begin;
alter table loom_event rename to loom_event_whole;
create table loom_event (like loom_event_whole including defaults including constraints)
    partition by range (execution_id);
create table loom_event_2026_11 partition of loom_event for values from ('2026-11') to ('2026-12');
create table loom_event_2026_12 partition of loom_event for values from ('2026-12') to ('2027-01');
create table loom_event_rest partition of loom_event default;
insert into loom_event select * from loom_event_whole;
drop table loom_event_whole;
alter table loom_event add primary key (execution_id, sequence);
commit;
